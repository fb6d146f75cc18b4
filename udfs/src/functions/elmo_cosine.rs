//! `elmo_cosine(a, b)`: the cosine similarity of two vectors.

use datafusion::logical_expr::ScalarUDFImpl;
use datafusion_macros::user_doc;

use crate::measure::{Measure, MeasureFunction, measure_function};

/// The name in SQL.
pub const NAME: &str = "elmo_cosine";

/// The function: `Float32`.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the cosine similarity of two vectors, from -1 to 1. Returns NULL if a vector is NULL or zero. Vectors of different dimensions are an error.",
    syntax_example = "elmo_cosine(a, b)",
    sql_example = r"```sql
> SELECT id, elmo_cosine(elmo_embed(text), elmo_embed('cold soup')) AS near FROM reviews;
```",
    argument(name = "a", description = "A vector: a list of numbers, of fixed or variable size."),
    argument(name = "b", description = "Another vector of the same dimension.")
)]
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoCosine(MeasureFunction);

impl Default for ElmoCosine {
    fn default() -> Self {
        Self(MeasureFunction::new(NAME, Measure::Cosine))
    }
}

impl ScalarUDFImpl for ElmoCosine {
    measure_function!();
}
