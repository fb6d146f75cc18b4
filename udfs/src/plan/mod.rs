//! The planner extension: each embedding of a query is computed once, after everything that can make rows fewer.
//!
//! | step | module |
//! |---|---|
//! | calls in an expression, and when they are needed | `calls` |
//! | a plan whose embeddings are computed as late as possible | [`defer`] |
//! | the operator in a logical plan | [`node`] |
//! | the operator at work | [`exec`] |
//! | the order of rows above a sort | `order` |
//! | equal texts, lately and right now | `memo` |
//! | rows of several batches as one | `parts` |
//! | settings | [`config`] |

pub(crate) mod calls;
pub mod config;
pub mod defer;
pub mod exec;
pub(crate) mod memo;
pub mod node;
mod order;
mod parts;
pub mod session;

/// The name of the operator that embeds, in physical plans.
pub const EXEC_NAME: &str = "EmbedExec";
