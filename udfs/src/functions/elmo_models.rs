//! `elmo_models()`: a table of the models that queries may name, one row each.

use std::sync::Arc;

use datafusion::{
    arrow::array::{ArrayRef, BooleanArray, RecordBatch, StringArray, UInt32Array},
    catalog::{MemTable, TableFunctionArgs, TableFunctionImpl, TableProvider},
    common::{DataFusionError, plan_err},
    error::Result,
};

use crate::models::{ModelFailed, Models};

/// The name in SQL.
pub const NAME: &str = "elmo_models";

/// The table function: `name, is_default, is_open, fingerprint, dimension, layers, lm_head, untrained, location, tokenizer,
/// sentences, state`. It
/// describes the models, but does not open them.
#[derive(Debug)]
pub struct ElmoModels(Models);

impl ElmoModels {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(models)
    }

    fn rows(&self) -> Result<RecordBatch> {
        let models = &self.0;
        let names: Vec<&str> = models.names().collect();
        let cards = names.iter().map(|name| models.card(Some(name))).collect::<Result<Vec<_>, _>>();
        let cards = cards.map_err(|reason| DataFusionError::External(Box::new(ModelFailed(reason))))?;
        let numbers = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let strings = |values: Vec<String>| Arc::new(StringArray::from(values)) as ArrayRef;
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("name", strings(names.iter().map(ToString::to_string).collect())),
            (
                "is_default",
                Arc::new(names.iter().map(|name| Some(*name == models.default_name())).collect::<BooleanArray>()),
            ),
            ("is_open", Arc::new(names.iter().map(|name| Some(models.is_open(name))).collect::<BooleanArray>())),
            ("fingerprint", strings(cards.iter().map(|card| card.fingerprint.to_string()).collect())),
            (
                "dimension",
                Arc::new(cards.iter().map(|card| Some(numbers(card.options.width()))).collect::<UInt32Array>()),
            ),
            (
                "layers",
                Arc::new(cards.iter().map(|card| Some(numbers(card.options.n_layers_out()))).collect::<UInt32Array>()),
            ),
            ("lm_head", Arc::new(cards.iter().map(|card| Some(card.lm_head.is_some())).collect::<BooleanArray>())),
            ("untrained", Arc::new(cards.iter().map(|card| Some(card.untrained)).collect::<BooleanArray>())),
            ("location", strings(cards.iter().map(|card| card.location.clone()).collect())),
            ("tokenizer", strings(cards.iter().map(|card| card.options.spec().tokenizer.to_string()).collect())),
            ("sentences", strings(cards.iter().map(|card| card.options.spec().sentences.to_string()).collect())),
            ("state", strings(cards.iter().map(|card| card.options.spec().state.to_string()).collect())),
        ];
        Ok(RecordBatch::try_from_iter(columns)?)
    }
}

impl TableFunctionImpl for ElmoModels {
    fn call_with_args(&self, args: TableFunctionArgs) -> Result<Arc<dyn TableProvider>> {
        if !args.exprs().is_empty() {
            return plan_err!("{NAME} takes no arguments");
        }
        let rows = self.rows()?;
        Ok(Arc::new(MemTable::try_new(rows.schema(), vec![vec![rows]])?))
    }
}
