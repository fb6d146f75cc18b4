//! `elmo_cosine(a, b)`: the cosine similarity of two vectors.

use datafusion::logical_expr::ScalarUDFImpl;
use datafusion_macros::user_doc;

use crate::measure::{Measure, MeasureFunction, measure_function};

/// The name in SQL.
pub const NAME: &str = "elmo_cosine";

/// The function: `Float32`.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the cosine similarity of two vectors, `Float32` from -1 (opposite) to 1 (the same direction). DataFusion's cosine_distance is 1 minus the similarity, so the nearest vectors have the smallest distance: it returns `Float64`, and converts vectors to lists of `Float64` first. Both return NULL if a vector is NULL, has a NULL, or has only zeros. Vectors of different dimensions are an error.",
    syntax_example = "elmo_cosine(a, b)",
    sql_example = r"```sql
> SELECT id, elmo_cosine(elmo_embed(text), elmo_embed('cold soup')) AS near FROM reviews;
```",
    argument(
        name = "a",
        description = "A vector: a list of numbers of any type, `FixedSizeList`, `List` or `LargeList`, read as `Float32`."
    ),
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
