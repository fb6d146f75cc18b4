//! Signals: the first asks a command to finish what it has begun, the second ends the process.
//!
//! SIGHUP counts as SIGTERM, so that a job whose terminal is closed keeps the lines that it read from standard input.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, oneshot},
};

use crate::{
    error::{Error, Exit, Result},
    report,
};

unsafe extern "C" {
    /// POSIX: ends the process at once. `exit` would run the destructors of libtorch while its threads compute.
    safe fn _exit(code: i32) -> !;
}

/// Ends the process at once, even while devices still compute results that are no longer needed.
pub(super) fn leave(exit: u8) -> ! {
    report::clear_bar();
    _exit(exit.into())
}

/// A request to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// SIGINT, which a terminal sends for Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// SIGHUP.
    Hangup,
}

/// The signals that request a command to end.
pub(super) struct Requests {
    interrupt: Signal,
    terminate: Signal,
    /// `None` when the process was started with SIGHUP ignored, as `nohup` does: then it stays ignored.
    hangup: Option<Signal>,
}

impl Requests {
    /// Installs the handlers. They stay for the rest of the process.
    ///
    /// # Errors
    /// [`Error::Failed`] when the system refuses a handler.
    pub(super) fn listen() -> Result<Self> {
        let hangup = match is_ignored(libc::SIGHUP) {
            true => None,
            false => Some(handler(SignalKind::hangup())?),
        };
        Ok(Self { interrupt: handler(SignalKind::interrupt())?, terminate: handler(SignalKind::terminate())?, hangup })
    }

    /// Waits for the next request.
    pub(super) async fn next(&mut self) -> Request {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => Request::Interrupt,
            _ = self.terminate.recv() => Request::Terminate,
            _ = hangup => Request::Hangup,
        }
    }

    /// Waits for SIGINT or SIGTERM after a first request. A further SIGHUP does not count: when a terminal is closed,
    /// both the shell and the kernel may send one.
    async fn repeated(&mut self) {
        while self.next().await == Request::Hangup {}
    }
}

fn handler(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|e| Error::Failed(format!("cannot listen for signals: {e}")))
}

/// Whether the process ignores a signal.
fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: without a new action, `sigaction` only writes the current one into `current`, for which zeros are valid.
    unsafe {
        let mut current: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut current) == 0 && current.sa_sigaction == libc::SIG_IGN
    }
}

/// Signals of an SQL session: the first cancels the current statement, a second one before the statement has ended ends
/// the process. At a prompt, Ctrl-C never ends the process, which would lose the tables of the session. Signals have a
/// thread of their own, because queries may keep all other threads busy.
pub(super) struct Signals {
    cancellations: mpsc::UnboundedReceiver<()>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// A statement is running.
    running: bool,
    /// The statement was cancelled.
    cancelled: bool,
    /// The session is to end.
    terminated: bool,
}

impl Signals {
    /// Installs the handlers. Ctrl-C between statements ends the process, unless the session is a prompt.
    ///
    /// # Errors
    /// [`Error::Failed`] when the system refuses a handler or a thread.
    pub(super) fn listen(prompt: bool) -> Result<Self> {
        let failed = |e: std::io::Error| Error::Failed(format!("cannot listen for signals: {e}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let mut requests = {
            let _entered = runtime.enter();
            Requests::listen()?
        };
        let (cancel, cancellations) = mpsc::unbounded_channel();
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        let listen = async move {
            loop {
                let request = requests.next().await;
                let mut state = lock(&shared);
                state.terminated |= request != Request::Interrupt;
                match (state.running, state.cancelled) {
                    (true, false) => {
                        state.cancelled = true;
                        let _ = cancel.send(());
                    }
                    (true, true) if request == Request::Hangup => {}
                    _ if prompt && request == Request::Interrupt => {}
                    _ => leave(Exit::Interrupted as u8),
                }
            }
        };
        let thread = std::thread::Builder::new().name("elmo signals".to_owned());
        thread.spawn(move || runtime.block_on(listen)).map_err(failed)?;
        Ok(Self { cancellations, state })
    }

    /// Marks the start of a statement. Earlier cancellations were meant for another one.
    pub(super) fn begin(&mut self) {
        *lock(&self.state) = State { running: true, ..State::default() };
        while self.cancellations.try_recv().is_ok() {}
    }

    /// Waits until the statement is cancelled.
    pub(super) async fn cancelled(&mut self) {
        if self.cancellations.recv().await.is_none() {
            std::future::pending().await
        }
    }

    /// Marks the end of a statement; returns whether the session is to end too.
    pub(super) fn end(&mut self) -> bool {
        let mut state = lock(&self.state);
        state.running = false;
        state.terminated
    }
}

/// Locks the flags. A poisoned lock is locked as well: the flags are valid at any time.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A future that ends at the first signal; a second signal ends the process. The first one ends it too as long as the
/// future was not polled, because then there is nothing to finish. A message says that the job stops when `what`.
pub(super) fn requested(what: &'static str) -> Result<impl Future<Output = ()>> {
    listen(format!("{what}; a second signal stops at once"), Further::Leave, || ())
}

/// As [`requested`], for one of several processes that stop together. Only the first signal counts: a scheduler may send one
/// to every process, and another one through their parent, which ends them by SIGKILL if it must. `missed` tells the others
/// when this process leaves before the future was polled.
pub(super) fn requested_of_several(
    what: &'static str,
    missed: impl FnOnce() + Send + 'static,
) -> Result<impl Future<Output = ()>> {
    listen(what.to_owned(), Further::Ignore, missed)
}

/// What a further signal does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Further {
    Leave,
    Ignore,
}

fn listen(
    message: String,
    further: Further,
    missed: impl FnOnce() + Send + 'static,
) -> Result<impl Future<Output = ()>> {
    let mut requests = Requests::listen()?;
    let (request, requested) = oneshot::channel();
    let awaited = Arc::new(AtomicBool::new(false));
    let is_awaited = Arc::clone(&awaited);
    tokio::spawn(async move {
        requests.next().await;
        if !is_awaited.load(Ordering::Relaxed) {
            tracing::warn!("interrupted before anything was written");
            missed();
            leave(Exit::Interrupted as u8);
        }
        tracing::warn!("stopping when {message}");
        let _ = request.send(());
        requests.repeated().await;
        match further {
            Further::Leave => leave(Exit::Interrupted as u8),
            // The handlers stay.
            Further::Ignore => {}
        }
    });
    Ok(async move {
        awaited.store(true, Ordering::Relaxed);
        // The sender lives as long as the runtime.
        let _ = requested.await;
    })
}

/// A future that ends at the first SIGINT or SIGTERM, for a process with nothing to finish. SIGHUP keeps its default
/// action, which ends the process.
#[cfg(feature = "cluster")]
pub(super) fn ended() -> Result<impl Future<Output = ()>> {
    let (mut interrupt, mut terminate) = (handler(SignalKind::interrupt())?, handler(SignalKind::terminate())?);
    Ok(async move { either(&mut interrupt, &mut terminate).await })
}

/// Whether there was a SIGINT or SIGTERM, and a future that ends at the second one.
#[cfg(feature = "cluster")]
pub(super) fn asked_twice() -> Result<(impl Fn() -> bool, impl Future<Output = ()>)> {
    let (mut interrupt, mut terminate) = (handler(SignalKind::interrupt())?, handler(SignalKind::terminate())?);
    let asked = Arc::new(AtomicBool::new(false));
    let is_asked = Arc::clone(&asked);
    let twice = async move {
        either(&mut interrupt, &mut terminate).await;
        is_asked.store(true, Ordering::Relaxed);
        tracing::warn!("stopping when the running tasks are done; a second signal stops at once");
        either(&mut interrupt, &mut terminate).await;
    };
    Ok((move || asked.load(Ordering::Relaxed), twice))
}

#[cfg(feature = "cluster")]
async fn either(interrupt: &mut Signal, terminate: &mut Signal) {
    tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
}

/// The command that resumes this one, quoted for a shell. If this one has overwritten the output, the flag is replaced
/// by `--overwrite=false`, because the environment or `elmo.toml` may set it too.
pub(super) fn resume_command(args: impl Iterator<Item = String>, has_overwritten: bool) -> String {
    let is_overwrite = |arg: &str| arg == "--overwrite" || arg.starts_with("--overwrite=");
    let off = has_overwritten.then(|| "--overwrite=false".to_owned());
    let args = args.filter(|arg| !has_overwritten || !is_overwrite(arg)).chain(off);
    args.map(|arg| quoted(&arg)).collect::<Vec<_>>().join(" ")
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
        // Before anything was removed, the flag stays.
        assert_eq!(resume_command(words.into_iter(), false), again.replace("embed", "embed --overwrite"));
    }
}
