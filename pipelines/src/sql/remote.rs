//! The trait through which other processes run parts of a query.

use std::fmt::Debug;

use datafusion::execution::session_state::SessionStateBuilder;

/// Runs parts of a session's queries in other processes.
pub trait Remote: Debug + Send + Sync {
    /// Adds a query planner that distributes plans. Called last, when the rest of the session is configured.
    fn extend(&self, builder: SessionStateBuilder) -> SessionStateBuilder;
}
