//! `elmo_dot(a, b)`: the dot product of two vectors.

use datafusion::logical_expr::ScalarUDFImpl;
use datafusion_macros::user_doc;

use crate::measure::{Measure, MeasureFunction, measure_function};

/// The name in SQL.
pub const NAME: &str = "elmo_dot";

/// The function: `Float32`.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the dot product of two vectors, `Float32`. Returns NULL if a vector is NULL or has a NULL. Vectors of different dimensions are an error.",
    syntax_example = "elmo_dot(a, b)",
    sql_example = r"```sql
> SELECT id, elmo_dot(elmo_embed(text), elmo_embed('cold soup')) AS near FROM reviews;
```",
    argument(
        name = "a",
        description = "A vector: a list of numbers of any type, `FixedSizeList`, `List` or `LargeList`, read as `Float32`."
    ),
    argument(name = "b", description = "Another vector of the same dimension.")
)]
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoDot(MeasureFunction);

impl Default for ElmoDot {
    fn default() -> Self {
        Self(MeasureFunction::new(NAME, Measure::Dot))
    }
}

impl ScalarUDFImpl for ElmoDot {
    measure_function!();
}
