//! elmo in your own DataFusion program: its functions, and its planner, which embeds only the rows that are needed.
//!
//!     cargo run --example sql_function

use datafusion::error::Result;
use elmo::Elmo;
use elmo_udfs::Models;

#[tokio::main]
async fn main() -> Result<()> {
    let elmo = Elmo::books().map_err(|e| datafusion::error::DataFusionError::External(Box::new(e)))?;
    // The same as `SessionStateBuilder::new().with_default_features().with_elmo(&models)`. To add only the functions to
    // an existing session, use `elmo_udfs::register_all`.
    let context = elmo_udfs::session(&Models::from(elmo));

    let reviews = "(VALUES (1, 'The soup was cold.'), (2, 'The waiter was warm.'), (3, NULL)) AS reviews (id, text)";
    // Options are named arguments, in any order; all of them are optional.
    let query = format!(
        "SELECT id, text, array_slice(elmo_embed(text, pooling => 'max', layers => 'top'), 1, 3) AS first_three FROM {reviews}"
    );
    elmo_udfs::sql(&context, &query).await?.show().await?;

    // The planner sorts first, so that one text is embedded instead of three. EXPLAIN shows it.
    let query =
        format!("SELECT id, elmo_similarity(text, 'a cold dish') AS near FROM {reviews} ORDER BY id DESC LIMIT 1");
    elmo_udfs::sql(&context, &format!("EXPLAIN {query}")).await?.show().await?;

    // An invalid value is an error of planning, which lists the legal values.
    let wrong = elmo_udfs::sql(&context, &format!("SELECT elmo_embed(text, pooling => 'median') FROM {reviews}")).await;
    println!("{}", wrong.err().map_or_else(String::new, |e| e.strip_backtrace()));
    Ok(())
}
