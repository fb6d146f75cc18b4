//! `elmo_l2(a, b)`: the Euclidean distance between two vectors.

use datafusion::logical_expr::ScalarUDFImpl;
use datafusion_macros::user_doc;

use crate::measure::{Measure, MeasureFunction, measure_function};

/// The name in SQL.
pub const NAME: &str = "elmo_l2";

/// The function: `Float32`.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the Euclidean distance between two vectors, `Float32`. Returns NULL if a vector is NULL or has a NULL. Vectors of different dimensions are an error.",
    syntax_example = "elmo_l2(a, b)",
    sql_example = r"```sql
> SELECT id, elmo_l2(elmo_embed(text), elmo_embed('cold soup')) AS near FROM reviews;
```",
    argument(
        name = "a",
        description = "A vector: a list of numbers of any type, `FixedSizeList`, `List` or `LargeList`, read as `Float32`."
    ),
    argument(name = "b", description = "Another vector of the same dimension.")
)]
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoL2(MeasureFunction);

impl Default for ElmoL2 {
    fn default() -> Self {
        Self(MeasureFunction::new(NAME, Measure::L2))
    }
}

impl ScalarUDFImpl for ElmoL2 {
    measure_function!();
}
