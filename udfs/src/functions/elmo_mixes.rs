//! `elmo_mixes()`: a table of the scalar mixes that queries may name, one row each.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{ArrayRef, BooleanArray, Float32Array, ListArray, RecordBatch, StringArray},
        datatypes::Float32Type,
    },
    catalog::{MemTable, TableFunctionArgs, TableFunctionImpl, TableProvider},
    common::{DataFusionError, plan_err},
    error::Result,
};
use elmo::mix::{MODEL_MIX, ScalarMix};

use crate::models::{ModelFailed, Models};

/// The name in SQL.
pub const NAME: &str = "elmo_mixes";

/// The table function: `name, model, scalars, gamma, layer_norm`. It describes the models, but does not open them.
#[derive(Debug)]
pub struct ElmoMixes(Models);

/// A row of the table.
struct Row<'a> {
    name: &'a str,
    /// The model in whose folder the mix is; `None` for a registered mix.
    model: Option<&'a str>,
    mix: ScalarMix,
}

impl ElmoMixes {
    /// The function over these models and mixes.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(models)
    }

    /// The registered mixes, then those of the models.
    fn mixes(&self) -> Result<Vec<Row<'_>>, String> {
        let mut rows: Vec<_> = self.0.mixes().map(|(name, mix)| Row { name, model: None, mix: mix.clone() }).collect();
        for model in self.0.names() {
            let mix = self.0.card(Some(model))?.mix.clone();
            rows.extend(mix.map(|mix| Row { name: MODEL_MIX, model: Some(model), mix }));
        }
        Ok(rows)
    }

    fn rows(&self) -> Result<RecordBatch> {
        let rows = self.mixes().map_err(|reason| DataFusionError::External(Box::new(ModelFailed(reason))))?;
        let scalars = rows.iter().map(|row| Some(row.mix.scalars.iter().copied().map(Some)));
        let columns: Vec<(&str, ArrayRef, bool)> = vec![
            ("name", Arc::new(rows.iter().map(|row| Some(row.name)).collect::<StringArray>()), false),
            ("model", Arc::new(rows.iter().map(|row| row.model).collect::<StringArray>()), true),
            ("scalars", Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(scalars)), false),
            ("gamma", Arc::new(rows.iter().map(|row| Some(row.mix.gamma)).collect::<Float32Array>()), false),
            ("layer_norm", Arc::new(rows.iter().map(|row| Some(row.mix.layer_norm)).collect::<BooleanArray>()), false),
        ];
        Ok(RecordBatch::try_from_iter_with_nullable(columns)?)
    }
}

impl TableFunctionImpl for ElmoMixes {
    fn call_with_args(&self, args: TableFunctionArgs) -> Result<Arc<dyn TableProvider>> {
        if !args.exprs().is_empty() {
            return plan_err!("{NAME} takes no arguments");
        }
        let rows = self.rows()?;
        Ok(Arc::new(MemTable::try_new(rows.schema(), vec![vec![rows]])?))
    }
}
