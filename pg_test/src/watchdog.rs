//! Ends what a run has started, however the run ends.
//!
//! A small shell process waits on a pipe whose other end only this program holds. When the program is gone, by
//! return, panic, signal or kill -9, the pipe closes and the shell ends every server that still works below the
//! run's directory, and removes the directory. It is in a process group of its own, so that a Ctrl-C at the
//! terminal does not end it first.
//!
//! Invariant: only processes that are PostgreSQL's or PgBouncer's and whose working directory is below the run's
//! own directory are ended. Nothing else ever works there.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, RwLock, RwLockReadGuard};
use std::thread;

use crate::environment::Environment;

/// SIGQUIT first, so that servers give their shared memory back; SIGKILL for what is left after ten seconds. What a
/// killed postmaster left in System V shared memory is named in line 7 of its pid file.
const SCRIPT: &str = r#"
dir=$1 socket_dir=$2 keep=$3
ours() {
    find /proc -mindepth 2 -maxdepth 2 -name cwd \( -lname "$dir" -o -lname "$dir/*" \) | while read -r cwd; do
        process=${cwd%/cwd}
        exe=$(readlink "$process/exe") || continue
        case ${exe##*/} in postgres|pgbouncer|psql|initdb|cp) echo "${process#/proc/}" ;; esac
    done
}
cd /
read -r _
for pid in $(ours); do kill -QUIT "$pid"; done
tries=200
while [ $tries -gt 0 ] && [ -n "$(ours)" ]; do tries=$((tries - 1)); sleep 0.05; done
for pid in $(ours); do kill -KILL "$pid"; done
for file in "$dir"/*/data/postmaster.pid; do
    set -- $(sed -n 7p "$file")
    [ -z "$2" ] || ipcrm -m "$2"
done
rm -rf "$socket_dir"
[ "$keep" = keep ] || rm -rf "$dir"
"#;

static WATCHDOG: Mutex<Option<Child>> = Mutex::new(None);
static STARTING: RwLock<()> = RwLock::new(());

/// To be held while something is started or written below the run's directory: a signal waits for it, and nothing
/// starts any more once one has come.
pub fn starting() -> RwLockReadGuard<'static, ()> {
    STARTING.read().unwrap_or_else(|e| e.into_inner())
}

/// Starts the watchdog, and has SIGINT, SIGTERM and SIGHUP end the program through it.
pub fn set_up(environment: &Environment, keep: bool) -> Result<(), String> {
    let child = Command::new("sh")
        .args(["-c", SCRIPT, "leasehold-pg-test-watchdog"])
        .arg(&environment.dir)
        .arg(&environment.socket_dir)
        .arg(if keep { "keep" } else { "remove" })
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|e| format!("cannot start the watchdog: {e}"))?;
    *WATCHDOG.lock().unwrap_or_else(|e| e.into_inner()) = Some(child);
    ctrlc::set_handler(|| {
        let _nothing_starts = STARTING.write().unwrap_or_else(|e| e.into_inner());
        finish();
        std::process::exit(130);
    })
    .map_err(|e| format!("cannot handle signals: {e}"))
}

/// Has the watchdog do its work now, and waits for it.
pub fn finish() {
    let mut watchdog = WATCHDOG.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(mut child) = watchdog.take() {
        drop(child.stdin.take());
        let _ = child.wait();
    }
}

/// Keeps the caller where a signal is ending the program: what it would say now is only an echo of that.
pub fn stay_if_ending() {
    let ending = || {
        STARTING
            .try_read()
            .is_err_and(|e| matches!(e, std::sync::TryLockError::WouldBlock))
    };
    while ending() {
        thread::park();
    }
}
