//! Ctrl-C and SIGTERM: the first asks a job to finish what it has begun, the second ends the process.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, oneshot},
};

use crate::error::{Error, Exit, Result};

unsafe extern "C" {
    /// POSIX: ends the process as it is. `exit` would run the destructors of libtorch while its threads compute.
    safe fn _exit(code: i32) -> !;
}

/// Ends the process as it is, also while devices are at work that nobody waits for any more.
pub(super) fn leave(exit: u8) -> ! {
    _exit(exit.into())
}

/// Signals of a session of statements: the first stops the statement at hand, one more before that has ended ends the
/// process. A thread of its own listens, as all others may be busy with a query.
pub(super) struct Signals {
    told: mpsc::UnboundedReceiver<()>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Somebody waits in [`Signals::asked`].
    running: bool,
    /// The statement was told to stop.
    stopping: bool,
    /// The whole session is to end.
    terminated: bool,
}

impl Signals {
    /// Listens from now on. Ctrl-C between statements ends the process, unless a person sits at a prompt.
    ///
    /// # Errors
    /// When the system takes no handlers.
    pub(super) fn listen(prompt: bool) -> Result<Self> {
        let failed = |e: std::io::Error| Error::Failed(format!("cannot listen for signals: {e}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (mut interrupt, mut terminate) = {
            let _entered = runtime.enter();
            (handler(SignalKind::interrupt())?, handler(SignalKind::terminate())?)
        };
        let (tell, told) = mpsc::unbounded_channel();
        let state = Arc::<Mutex<State>>::default();
        let seen = Arc::clone(&state);
        let listen = async move {
            loop {
                let terminated = tokio::select! { _ = interrupt.recv() => false, _ = terminate.recv() => true };
                let mut state = lock(&seen);
                state.terminated |= terminated;
                match (state.running, state.stopping) {
                    (true, false) => {
                        state.stopping = true;
                        let _ = tell.send(());
                    }
                    (false, _) if prompt && !terminated => {}
                    _ => _exit(Exit::Interrupted as i32),
                }
            }
        };
        let thread = std::thread::Builder::new().name("elmo signals".to_owned());
        thread.spawn(move || runtime.block_on(listen)).map_err(failed)?;
        Ok(Self { told, state })
    }

    /// A statement begins: what was told before was meant for another.
    pub(super) fn begin(&mut self) {
        *lock(&self.state) = State { running: true, ..State::default() };
        while self.told.try_recv().is_ok() {}
    }

    /// Ends when the statement is to stop.
    pub(super) async fn asked(&mut self) {
        if self.told.recv().await.is_none() {
            std::future::pending().await
        }
    }

    /// The statement has ended; whether the session is to end too.
    pub(super) fn end(&mut self) -> bool {
        let mut state = lock(&self.state);
        state.running = false;
        state.terminated
    }
}

/// Plain flags, valid at any time.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
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

/// A future that ends at the first signal, of a process that has nothing to finish.
#[cfg(feature = "cluster")]
pub(super) fn ended() -> Result<impl Future<Output = ()>> {
    let mut interrupt = handler(SignalKind::interrupt())?;
    let mut terminate = handler(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
    })
}

/// Whether there was a signal, and a future that ends at the second one.
#[cfg(feature = "cluster")]
pub(super) fn asked_twice() -> Result<(impl Fn() -> bool, impl Future<Output = ()>)> {
    let mut interrupt = handler(SignalKind::interrupt())?;
    let mut terminate = handler(SignalKind::terminate())?;
    let asked = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&asked);
    let twice = async move {
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        seen.store(true, Ordering::Relaxed);
        tracing::warn!("stopping when the tasks at hand are done; once more stops at once");
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
    };
    Ok((move || asked.load(Ordering::Relaxed), twice))
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
