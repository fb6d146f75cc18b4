//! Where queries run when it is not this process.

use std::fmt::Debug;

use datafusion::execution::session_state::SessionStateBuilder;

/// Other processes that run parts of a query.
pub trait Remote: Debug + Send + Sync {
    /// Adds a planner that gives them their parts; called when everything else of the session is set.
    fn extend(&self, builder: SessionStateBuilder) -> SessionStateBuilder;
}
