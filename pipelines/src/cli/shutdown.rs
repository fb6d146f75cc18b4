//! Ctrl-C and SIGTERM: the first asks a job to finish what it has begun, the second ends the process.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

use crate::error::{Error, Exit, Result};

unsafe extern "C" {
    /// POSIX: ends the process as it is. `exit` would run the destructors of libtorch while its threads compute.
    safe fn _exit(code: i32) -> !;
}

/// Ends the process while devices are at work, which nobody waits for any more.
pub(super) fn leave(exit: Exit) -> ! {
    _exit(exit as i32)
}

/// Ends at the first Ctrl-C or SIGTERM; for what has nothing to finish when it is stopped.
///
/// # Errors
/// When the system takes no handlers.
pub(super) async fn asked() -> Result<()> {
    let (mut interrupt, mut terminate) = (handler(SignalKind::interrupt())?, handler(SignalKind::terminate())?);
    tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
    Ok(())
}

fn handler(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|e| Error::Failed(format!("cannot listen for signals: {e}")))
}

/// A future that ends at the first signal. From then on a second one ends the process at once; so does the first where
/// nobody has begun to wait for this future, as nothing is under way then.
pub(super) fn requested() -> Result<impl Future<Output = ()>> {
    let mut interrupt = handler(SignalKind::interrupt())?;
    let mut terminate = handler(SignalKind::terminate())?;
    let (tell, told) = oneshot::channel();
    let heeded = Arc::new(AtomicBool::new(false));
    let waiting = Arc::clone(&heeded);
    tokio::spawn(async move {
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        if !waiting.load(Ordering::Relaxed) {
            tracing::warn!("stopped before anything was written");
            _exit(Exit::Interrupted as i32);
        }
        tracing::warn!("stopping as soon as the rows at hand are safe; once more stops at once");
        let _ = tell.send(());
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        _exit(Exit::Interrupted as i32);
    });
    Ok(async move {
        heeded.store(true, Ordering::Relaxed);
        // The sender is gone only together with the runtime.
        let _ = told.await;
    })
}

/// The command that continues this one, as the shell would read it. One that began anew must not do so again, be it that
/// a flag, the environment or the settings file said so: it says the contrary.
pub(super) fn resume_command(words: impl Iterator<Item = String>, began_anew: bool) -> String {
    let is_overwrite = |word: &str| word == "--overwrite" || word.starts_with("--overwrite=");
    let contrary = began_anew.then(|| "--overwrite=false".to_owned());
    let words = words.filter(|word| !began_anew || !is_overwrite(word)).chain(contrary);
    words.map(|word| quoted(&word)).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shell_reads_back_what_was_typed() {
        let words = ["elmo", "embed", "--overwrite", "--input", "a b.txt", "it's", "x*", ""].map(str::to_owned);
        let again = r"elmo embed --input 'a b.txt' 'it'\''s' 'x*' ''";
        assert_eq!(resume_command(words.clone().into_iter(), true), format!("{again} --overwrite=false"));
        // Before anything was removed, it is still to begin anew.
        assert_eq!(resume_command(words.into_iter(), false), again.replace("embed", "embed --overwrite"));
    }
}
