//! Runs tests one after the other. A test is a plain function; a panic is a failure, and so is one that does not end
//! in its layer's time, and one in whose time a process of a server died by a fault of its own, even if the test did
//! not notice. The tests after it run all the same.

use std::any::Any;
use std::cell::RefCell;
use std::fs;
use std::panic;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::cluster::{Cluster, log_marks, log_since};
use crate::watchdog;

pub type Test = (&'static str, fn());

/// Tests that belong together and run together.
pub struct Layer {
    pub name: &'static str,
    pub about: &'static str,
    /// How long one test may take before it counts as hanging.
    pub limit: Duration,
    pub tests: &'static [&'static [Test]],
}

impl Layer {
    pub fn tests(&self) -> impl Iterator<Item = Test> {
        self.tests.iter().flat_map(|tests| tests.iter().copied())
    }
}

/// Lists a module's tests under `TESTS`. A test function that is not listed is dead code, which clippy refuses.
#[macro_export]
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        pub const TESTS: &[$crate::runner::Test] = &[$((stringify!($name), $name)),*];
    };
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Has panics of test threads kept for the report, in place of being printed in between.
pub fn set_up() {
    let default = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if thread::current()
            .name()
            .is_some_and(|name| name.starts_with("test "))
        {
            PANIC.set(Some(info.to_string()));
        } else {
            default(info);
        }
    }));
}

/// Runs the tests of a layer that `wanted` picks, and says how many passed and failed.
pub fn run(layer: &Layer, wanted: impl Fn(&str) -> bool) -> (usize, usize) {
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in layer.tests() {
        let full = format!("{}::{name}", layer.name);
        if !wanted(&full) {
            continue;
        }
        let marks = log_marks();
        let outcome = run_one(&full, test, layer.limit).and_then(|()| no_fault(&marks));
        watchdog::stay_if_ending();
        match outcome {
            Ok(()) => passed += 1,
            Err(message) => {
                failed += 1;
                report(&full, &message, &marks);
            }
        }
    }
    (passed, failed)
}

fn run_one(full: &str, test: fn(), limit: Duration) -> Result<(), String> {
    let (sender, done) = channel();
    let body = move || {
        let outcome = panic::catch_unwind(test).map_err(|payload| message_of(payload.as_ref()));
        let _ = sender.send(outcome);
    };
    thread::Builder::new()
        .name(format!("test {full}"))
        .spawn(body)
        .expect("a thread can be started");
    match done.recv_timeout(limit) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Disconnected) => Err("the test's thread died".to_owned()),
        Err(RecvTimeoutError::Timeout) => {
            let activity = activity();
            // whatever the test has left behind there must not disturb the next one
            Cluster::forget_shared();
            Err(format!(
                "not done after {limit:?}; sessions of the shared server:\n{activity}"
            ))
        }
    }
}

/// A failed assertion, an abort and a bad access are failures in any log: servers start again after them by themselves.
fn no_fault(marks: &[(PathBuf, u64)]) -> Result<(), String> {
    for (path, _) in log_marks() {
        let bytes = fs::read(&path).unwrap_or_default();
        let from = marks
            .iter()
            .find(|(marked, _)| *marked == path)
            .map_or(0, |(_, length)| *length);
        let new = bytes
            .get(usize::try_from(from).unwrap_or(0)..)
            .unwrap_or_default();
        if let Some(line) = String::from_utf8_lossy(new).lines().find(|l| is_fault(l)) {
            return Err(format!("a process of the server died: {line}"));
        }
    }
    Ok(())
}

/// Whether a line of a server's log says that a process died by a fault of its own.
fn is_fault(line: &str) -> bool {
    let signal = line
        .split_once("was terminated by signal ")
        .and_then(|(_, rest)| rest.split(':').next());
    // SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
    line.starts_with("TRAP: ") || matches!(signal, Some("4" | "6" | "7" | "8" | "11"))
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    let said = payload.downcast_ref::<String>().cloned();
    let said = said.or_else(|| payload.downcast_ref::<&str>().map(|s| (*s).to_owned()));
    PANIC
        .take()
        .or(said)
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

fn report(full: &str, message: &str, marks: &[(PathBuf, u64)]) {
    println!("FAILED {full}");
    message.lines().for_each(|line| println!("    {line}"));
    log_since(marks)
        .lines()
        .for_each(|line| println!("    | {line}"));
}

fn activity() -> String {
    let sql = "SELECT concat_ws(' | ', pid, state, wait_event_type, wait_event, pg_blocking_pids(pid), query)
               FROM pg_stat_activity WHERE backend_type = 'client backend'";
    let rows = Cluster::shared()
        .connect()
        .try_rows(sql)
        .unwrap_or_default();
    rows.into_iter()
        .flatten()
        .flatten()
        .map(|line| line + "\n")
        .collect()
}

#[cfg(test)]
mod tests {
    use super::is_fault;

    #[test]
    fn a_fault_is_told_from_a_kill() {
        for line in [
            "TRAP: FailedAssertion(\"n > 0\", File: \"x.c\", Line: 1, PID: 2)",
            "TRAP: failed Assert(\"n > 0\"), File: \"x.c\", Line: 1, PID: 2",
            "2026-01-01 UTC [1]  00000 LOG:  server process (PID 2) was terminated by signal 6: Aborted",
            "LOG:  background worker \"leasehold\" (PID 2) was terminated by signal 11: Segmentation fault",
        ] {
            assert!(is_fault(line), "{line}");
        }
        for line in [
            "LOG:  server process (PID 2) was terminated by signal 9: Killed",
            "LOG:  server process (PID 2) was terminated by signal 15: Terminated",
            "LOG:  server process (PID 2) exited with exit code 2",
            "STATEMENT:  SELECT 'TRAP: '",
        ] {
            assert!(!is_fault(line), "{line}");
        }
    }
}
