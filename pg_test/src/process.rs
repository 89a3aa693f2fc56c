//! Processes of a server, held by pidfd, so that their end is an event and a reused pid is never mistaken for them.

use std::fs;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
pub use rustix::process::Signal;
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};

/// One process, which may have ended meanwhile.
pub struct Process {
    pub pid: i32,
    fd: Option<OwnedFd>,
}

impl Process {
    pub fn open(pid: i32) -> Self {
        let fd = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self { pid, fd }
    }

    /// The children that a process has now.
    pub fn children_of(parent: i32) -> Vec<Self> {
        let entries = fs::read_dir("/proc").expect("/proc can be read");
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(|pid| parent_of(*pid) == Some(parent))
            .map(Self::open)
            .collect()
    }

    /// Sends a signal; a process that has ended takes no notice.
    pub fn signal(&self, signal: Signal) {
        if let Some(fd) = &self.fd {
            let _ = pidfd_send_signal(fd, signal);
        }
    }

    /// Waits for the end of the process; false where it has not come within `limit`.
    #[must_use]
    pub fn wait_gone(&self, limit: Duration) -> bool {
        let Some(fd) = &self.fd else { return true };
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).expect("a limit is a short time");
            match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => panic!("cannot wait for process {}: {e}", self.pid),
            }
        }
    }
}

fn parent_of(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // the name, in parentheses, may hold blanks; state and parent follow it
    stat.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(1)?
        .parse()
        .ok()
}
