//! What one run of the tests stands on: the PostgreSQL it tests, the operating system user that its servers run
//! as, and its directories.
//!
//! Invariants: everything that a run leaves on disk is below `Environment::dir` and `Environment::socket_dir`, and
//! every process that it starts for longer than one command has its working directory below `dir`. The watchdog
//! leans on both. Servers see none of the caller's environment: neither PG* variables nor RUST_BACKTRACE, which
//! would put backtraces into error details.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// Room that PostgreSQL's socket address leaves for the path, less the socket's own name.
const SOCKET_DIR_BYTES_MAX: usize = 107 - "/.s.PGSQL.5432".len();

static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();

pub struct Environment {
    pub bindir: PathBuf,
    pub sharedir: PathBuf,
    pub pkglibdir: PathBuf,
    pub dir: PathBuf,
    pub socket_dir: PathBuf,
    /// The user that servers run as where that is not the current one: PostgreSQL refuses to run as root.
    server_user: Option<(u32, u32)>,
}

/// The environment of this run. Panics before `Environment::set_up`.
pub fn environment() -> &'static Environment {
    ENVIRONMENT
        .get()
        .expect("the environment is set up before any test")
}

impl Environment {
    pub fn set_up(pg_config: &Path) -> Result<&'static Self, String> {
        let server_user = match rustix::process::geteuid().is_root() {
            true => Some((id_of_postgres("-u")?, id_of_postgres("-g")?)),
            false => None,
        };
        let temp = std::env::temp_dir();
        let dir = match target_dir()
            .and_then(|target| make_dir(&target.join("pg-test"), server_user).ok())
        {
            Some(dir) => dir,
            None => make_dir(&temp, server_user)?,
        };
        let socket_dir = make_dir(&temp, server_user)?;
        if socket_dir.join("000").as_os_str().len() > SOCKET_DIR_BYTES_MAX {
            return Err(format!(
                "{} is too long a path for a unix socket: set TMPDIR",
                socket_dir.display()
            ));
        }
        let environment = Self {
            bindir: ask(pg_config, "--bindir")?,
            sharedir: ask(pg_config, "--sharedir")?,
            pkglibdir: ask(pg_config, "--pkglibdir")?,
            dir,
            socket_dir,
            server_user,
        };
        let control = environment.sharedir.join("extension/leasehold.control");
        if !control.exists() {
            return Err(format!(
                "{} does not exist: run `make install` first",
                control.display()
            ));
        }
        Ok(ENVIRONMENT.get_or_init(|| environment))
    }

    /// A command that runs as the servers' user with a clean environment and works in `cwd`.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>, cwd: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("LC_ALL", "C");
        command.current_dir(cwd);
        if let Some((uid, gid)) = self.server_user {
            command.uid(uid).gid(gid);
        }
        command
    }

    /// The same for one of PostgreSQL's own programs.
    pub fn pg_command(&self, program: &str, cwd: &Path) -> Command {
        self.command(self.bindir.join(program), cwd)
    }

    /// Makes a directory that the servers' user owns.
    pub fn make_dir(&self, path: &Path) {
        fs::create_dir(path).unwrap_or_else(|e| panic!("cannot create {}: {e}", path.display()));
        own(path, self.server_user)
            .unwrap_or_else(|e| panic!("cannot own {}: {e}", path.display()));
    }
}

/// Runs a command to its end and gives its standard output; panics with its output where it fails.
#[track_caller]
pub fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("cannot run {command:?}: {e}"));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{stdout}{stderr}",
        output.status
    );
    stdout
}

fn ask(pg_config: &Path, option: &str) -> Result<PathBuf, String> {
    let output = Command::new(pg_config).arg(option).output();
    let output = output.map_err(|e| format!("cannot run {}: {e}", pg_config.display()))?;
    if !output.status.success() {
        return Err(format!("{} {option} failed", pg_config.display()));
    }
    Ok(PathBuf::from(
        String::from_utf8_lossy(&output.stdout).trim(),
    ))
}

fn id_of_postgres(option: &str) -> Result<u32, String> {
    let output = Command::new("id")
        .args([option, "postgres"])
        .output()
        .map_err(|e| format!("cannot run id: {e}"))?;
    let id = String::from_utf8_lossy(&output.stdout).trim().parse();
    id.map_err(|_| {
        "run as root, but there is no operating system user postgres to run servers as".to_owned()
    })
}

/// Cargo's target directory: the one this program was built into.
fn target_dir() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    Some(program.parent()?.parent()?.to_owned())
}

fn own(path: &Path, server_user: Option<(u32, u32)>) -> std::io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))?;
    match server_user {
        Some((uid, gid)) => chown(path, Some(uid), Some(gid)),
        None => Ok(()),
    }
}

/// Makes a directory of its own name below `parent` and sees to it that the servers' user gets there.
fn make_dir(parent: &Path, server_user: Option<(u32, u32)>) -> Result<PathBuf, String> {
    let say = |e: std::io::Error| format!("cannot create a directory in {}: {e}", parent.display());
    fs::create_dir_all(parent).map_err(say)?;
    let nanos = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.subsec_nanos());
    let dir = parent.join(format!("lh-{}-{nanos:x}", std::process::id()));
    fs::create_dir(&dir).map_err(say)?;
    own(&dir, server_user).map_err(say)?;
    let mut probe = Command::new("test");
    probe.arg("-w").arg(&dir);
    if let Some((uid, gid)) = server_user {
        probe.uid(uid).gid(gid);
    }
    if probe.status().is_ok_and(|status| status.success()) {
        return Ok(dir);
    }
    fs::remove_dir(&dir).map_err(say)?;
    Err(format!("the servers' user cannot reach {}", dir.display()))
}
