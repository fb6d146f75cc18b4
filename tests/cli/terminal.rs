//! A program in a pseudoterminal, and what a person would see on its screen.

use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, ExitStatus},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// How long to wait for an output. Machines of tests may be busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program that runs in a terminal.
pub(crate) struct Terminal {
    keys: File,
    child: Child,
    seen: Arc<Mutex<Vec<u8>>>,
    /// How many bytes of `seen` were waited for.
    read: usize,
}

/// A failed test leaves no program behind.
impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Terminal {
    /// Starts a program in a terminal of this size.
    pub(crate) fn start(mut command: Command, columns: u16, rows: u16) -> Self {
        let (ours, theirs) = open(columns, rows);
        command.env("TERM", "xterm").env("LANG", "C.UTF-8");
        let (input, output) = (theirs.try_clone().unwrap(), theirs.try_clone().unwrap());
        command.stdin(input).stdout(output).stderr(theirs);
        // SAFETY: both functions may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // Makes it the controlling terminal, which sends SIGINT for Ctrl-C.
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        // The command holds descriptors of the terminal; reading from it ends when all are closed.
        drop(command);
        let seen = Arc::<Mutex<Vec<u8>>>::default();
        let (mut screen, store) = (File::from(ours.try_clone().unwrap()), Arc::clone(&seen));
        thread::spawn(move || {
            let mut block = [0; 4096];
            while let Ok(n) = screen.read(&mut block) {
                if n == 0 {
                    break;
                }
                store.lock().unwrap().extend_from_slice(&block[..n]);
            }
        });
        Self { keys: File::from(ours), child, seen, read: 0 }
    }

    /// Types keys.
    pub(crate) fn keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the program writes `text` after what was waited for before. Returns the output up to it.
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let began = Instant::now();
        loop {
            let new = String::from_utf8_lossy(&self.seen.lock().unwrap()[self.read..]).into_owned();
            if let Some(at) = new.find(text) {
                self.read += at + text.len();
                return new[..at + text.len()].to_owned();
            }
            assert!(began.elapsed() < PATIENCE, "no {text:?} in {new}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Types a line at the prompt of the shell, and returns the output up to the next prompt.
    pub(crate) fn line(&mut self, line: &str) -> String {
        self.keys(&format!("{line}\r"));
        // The line is drawn again when it is complete; then the terminal leaves the mode of the editor.
        self.wait_for("\x1b[?2004l");
        self.prompt()
    }

    /// Waits for the prompt of the shell.
    pub(crate) fn prompt(&mut self) -> String {
        self.wait_for("elmo> ")
    }

    /// The process id of the program.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of the program. Also returns all that it wrote.
    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        let began = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if began.elapsed() > PATIENCE {
                let _ = self.child.kill();
                panic!("it does not end: {}", String::from_utf8_lossy(&self.seen.lock().unwrap()));
            }
            thread::sleep(Duration::from_millis(20));
        }
        let status = self.child.wait().unwrap();
        // Programs of other tests may have inherited the terminal, so its end is not that of the output.
        let mut len = None;
        while len != Some(self.seen.lock().unwrap().len()) {
            len = Some(self.seen.lock().unwrap().len());
            thread::sleep(Duration::from_millis(300));
        }
        (status, String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned())
    }
}

/// A pseudoterminal: the user's end and the program's end.
fn open(columns: u16, rows: u16) -> (OwnedFd, OwnedFd) {
    let (mut ours, mut theirs) = (0, 0);
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: both descriptors are written before they are read, and owned by nobody else.
    unsafe {
        let opened = libc::openpty(&mut ours, &mut theirs, std::ptr::null_mut(), std::ptr::null(), &size);
        assert_eq!(opened, 0);
        (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
    }
}

/// The lines that a terminal without a limit of rows shows after this output: what was erased or overwritten is gone.
pub(crate) fn screen(output: &str) -> String {
    let (mut lines, mut row, mut column) = (vec![Vec::<char>::new()], 0, 0);
    let mut chars = output.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\r' => column = 0,
            '\n' => row += 1,
            '\x07' => {}
            '\x1b' if chars.peek() == Some(&'[') => {
                chars.next();
                let mut digits = String::new();
                while let Some(c) = chars.next_if(|c| !c.is_ascii_alphabetic()) {
                    digits.push(c);
                }
                let n = digits.parse().unwrap_or(1);
                match chars.next() {
                    Some('A') => row -= usize::min(n, row),
                    Some('B') => row += n,
                    Some('C') => column += n,
                    Some('D') => column -= usize::min(n, column),
                    Some('G') => column = n - 1,
                    Some('K') if digits == "2" => lines[row].clear(),
                    Some('K') => lines[row].truncate(column),
                    Some('J') => {
                        lines[row].truncate(column);
                        lines.truncate(row + 1);
                    }
                    _ => {}
                }
            }
            c => {
                let line = &mut lines[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = c;
                column += 1;
            }
        }
        if row >= lines.len() {
            lines.resize(row + 1, Vec::new());
        }
    }
    lines.iter().map(|line| line.iter().collect::<String>().trim_end().to_owned() + "\n").collect()
}
