//! A wall clock that a test sets, for the servers that are given it and for nobody else: libfaketime, which is loaded into
//! them ahead of the C library. The clocks that no one can set stay as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::cluster::Cluster;
use crate::environment::environment;
use crate::session::Session;

pub struct WallClock {
    library: PathBuf,
    file: PathBuf,
    seconds: AtomicI64,
}

impl WallClock {
    pub fn new() -> Self {
        static CLOCKS: AtomicU32 = AtomicU32::new(0);
        let dir = environment().dir.join(format!(
            "wall-clock-{}",
            CLOCKS.fetch_add(1, Ordering::Relaxed)
        ));
        environment().make_dir(&dir);
        let clock = Self {
            library: library()
                .expect("libfaketime is installed: scripts/bootstrap test sees to it"),
            file: dir.join("offset"),
            seconds: 0.into(),
        };
        clock.set(0);
        clock
    }

    /// The server has this clock from its next start on.
    pub fn give_to(&self, cluster: &Cluster) {
        for (name, value) in self.variables() {
            cluster.set_variable(name, &value);
        }
    }

    fn variables(&self) -> [(&'static str, String); 5] {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        [
            ("LD_PRELOAD", text(&self.library)),
            ("FAKETIME_TIMESTAMP_FILE", text(&self.file)),
            // all processes see a step at once
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
            ("NO_FAKE_STAT", "1".to_owned()),
        ]
    }

    /// Sets the wall clock to so much from the true time.
    pub fn set(&self, seconds: i64) {
        // in one step: a file that is being written has no time in it
        let new = self.file.with_extension("new");
        fs::write(&new, format!("{seconds:+}\n")).expect("the clock's directory can be written");
        // the servers' user reads it
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        fs::set_permissions(&new, mode).expect("the file is ours");
        fs::rename(&new, &self.file).expect("the clock's directory can be written");
        self.seconds.store(seconds, Ordering::Relaxed);
    }

    /// Makes sure that a server has this clock.
    pub fn is_seen_by(&self, session: &mut Session) {
        let theirs: f64 = session.one("SELECT extract(epoch FROM clock_timestamp())::float8");
        let ours = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("it is after 1970");
        let seconds = self.seconds.load(Ordering::Relaxed) as f64;
        let off = theirs - ours.as_secs_f64() - seconds;
        assert!(
            off.abs() < 1800.0,
            "the server's clock is {off} s from where it was set"
        );
    }
}

/// Where Debian and others have it.
fn library() -> Option<PathBuf> {
    let parents = ["/usr/lib", "/usr/lib64"].map(PathBuf::from);
    let below = parents
        .iter()
        .filter_map(|parent| fs::read_dir(parent).ok());
    let below = below.flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let candidates = below.chain(parents.iter().cloned());
    candidates
        .map(|dir| dir.join("faketime/libfaketime.so.1"))
        .find(|path| path.exists())
}
