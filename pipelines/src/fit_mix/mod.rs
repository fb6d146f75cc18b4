//! Fits a scalar mix to labelled data: the job of `elmo fit-mix`. The fit itself is in the library's `train` module.
//!
//! ```text
//! CoNLL columns or labelled rows --Dataset--> frozen biLM --Features (on disk)--> fits, a thread each --> mix.json, scores
//! ```
//!
//! Labels and texts are in memory; vectors are on disk, and a fit reads those of one example at a time.
//!
//! | file | what it has |
//! |---|---|
//! | `conll.rs` | tagged sentences: columns of text, a blank line between sentences |
//! | `rows.rs` | labelled texts: rows of the files that `elmo embed` reads |
//! | `dataset.rs` | what both become |
//! | `features.rs` | the cache: a file with the layers of all tokens |
//! | `extract.rs` | computes it |
//! | `entities.rs` | entities of a tagged sentence, as conlleval finds them |
//! | `scores.rs` | F1 and accuracy |
//! | `fits.rs` | the fits: the mix and its baselines, for every seed |
//! | `run.rs` | the job |
//! | `report.rs` | its report |

mod conll;
mod dataset;
mod entities;
mod extract;
mod features;
mod fits;
mod report;
mod rows;
mod run;
mod scores;

pub use self::{
    conll::TagColumns,
    report::{FitMixReport, FittedSystem, SeedResult},
    run::{Data, FitMixJob, fit_mix},
};
