//! The planner extension: each embedding of a query is computed once, and after the operators that reduce the number of
//! rows.
//!
//! | step | module |
//! |---|---|
//! | rewrites calls before DataFusion evaluates constants | `rewrite`, `values` |
//! | finds the calls in an expression and the rows that need them | `calls` |
//! | moves calls towards the root of a logical plan | [`defer`] |
//! | the operator in a logical plan | [`node`] |
//! | makes the physical operator from the logical one | `planner` |
//! | the physical operator | [`exec`] |
//! | preserves the order of a sort below the operator | `order` |
//! | distributes comparisons of vectors over partitions | `small_batches` |
//! | settings | [`config`] |
//! | adds all of this to a session | [`session`] |

mod calls;
pub mod config;
pub mod defer;
pub mod exec;
mod expr;
pub mod node;
mod order;
mod planner;
pub(crate) mod rewrite;
pub mod session;
mod small_batches;
mod values;

pub use self::{exec::EXEC_NAME, planner::EmbedPlanner};
