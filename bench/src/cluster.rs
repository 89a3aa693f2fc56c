//! The throwaway server that everything runs on: a new cluster, reached by a unix socket only, with
//! fsync on, in a directory of its own under cargo's target directory.
//!
//! Invariant: the server ends and its directories go when this program ends, however it ends. A
//! keeper, a shell process in a process group of its own (so that a Ctrl-C does not reach it), makes
//! the cluster, starts it, and then reads commands from a pipe. The pipe closes when this program
//! stops the cluster or is gone, be it by kill -9, and the keeper takes everything down.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use postgres::{Client, Config, NoTls};

use crate::Result;

/// The superuser, whatever the operating system's user is called.
pub const SUPERUSER: &str = "postgres";

/// PostgreSQL refuses to run as root; this user runs it then.
const SERVER_USER: &str = "postgres";

/// Room for everything that a row does, so that no checkpoint and no vacuum falls into one
/// competitor's run and not into another's.
const SETTINGS: &str = "\
listen_addresses = ''
fsync = on
shared_buffers = 512MB
max_wal_size = 8GB
checkpoint_timeout = 1h
autovacuum = off
max_connections = 100
log_min_messages = warning
";

/// Arguments: directory, socket directory, directory of the programs, then how to become the
/// servers' user (nothing where we are not root).
const KEEPER: &str = r#"
trap '' HUP INT TERM PIPE
dir=$1 sockets=$2 bin=$3
shift 3
cd "$dir" || exit
PGDATA=$dir/data
export PGDATA
"$@" "$bin/initdb" --username=postgres --auth=trust --encoding=UTF8 --no-locale --no-instructions >keeper.log 2>&1 &&
    cat settings >>data/postgresql.conf &&
    "$@" "$bin/pg_ctl" start --silent --wait --log="$dir/server.log" >>keeper.log 2>&1 &&
    echo ready || echo failed
while read -r command; do
    case $command in
    crash) "$@" "$bin/pg_ctl" stop --silent --wait --mode=immediate >>keeper.log 2>&1 ;;
    start) "$@" "$bin/pg_ctl" start --silent --no-wait --log="$dir/server.log" >>keeper.log 2>&1 ;;
    esac && echo ready || echo failed
done
"$@" "$bin/pg_ctl" stop --silent --wait --mode=immediate >>keeper.log 2>&1
cd /
rm -rf "$dir" "$sockets"
"#;

static CLUSTERS: AtomicU32 = AtomicU32::new(0);

/// A running server.
pub struct Cluster {
    bindir: PathBuf,
    dir: PathBuf,
    socket_dir: PathBuf,
    keeper: Child,
    answers: BufReader<ChildStdout>,
}

impl Cluster {
    /// Starts a new cluster with further lines for postgresql.conf; returns when it takes connections.
    pub fn start(pg_config: &Path, settings: &[&str]) -> Result<Self> {
        let bindir = ask(pg_config, "--bindir")?;
        let server_user = if id(&["-u"])? == 0 {
            Some((id(&["-u", SERVER_USER])?, id(&["-g", SERVER_USER])?))
        } else {
            None
        };
        let dir = match target_dir().and_then(|target| new_dir(&target, server_user).ok()) {
            Some(dir) => dir,
            None => new_dir(&std::env::temp_dir(), server_user)?,
        };
        let socket_dir = new_dir(&std::env::temp_dir(), server_user)?;
        let lines = format!(
            "{SETTINGS}unix_socket_directories = '{}'\n",
            socket_dir.display()
        );
        fs::write(dir.join("settings"), lines + &settings.join("\n") + "\n")?;

        let mut keeper = clean(Command::new("sh"));
        keeper
            .args(["-c", KEEPER, "leasehold-bench-keeper"])
            .args([&dir, &socket_dir, &bindir]);
        if server_user.is_some() {
            keeper.args(["runuser", "-u", SERVER_USER, "--"]);
        }
        let mut keeper = keeper
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let answers = BufReader::new(keeper.stdout.take().ok_or("the keeper has no output")?);
        let mut cluster = Cluster {
            bindir,
            dir,
            socket_dir,
            keeper,
            answers,
        };
        cluster.wait_ready()?;
        Ok(cluster)
    }

    /// Starts one that has leasehold, in the database postgres.
    pub fn with_leasehold(pg_config: &Path, settings: &[&str]) -> Result<Self> {
        let mut lines = vec!["shared_preload_libraries = 'leasehold'"];
        lines.extend(settings);
        let cluster = Cluster::start(pg_config, &lines)?;
        cluster
            .connect()?
            .batch_execute("CREATE EXTENSION leasehold")?;
        Ok(cluster)
    }

    fn wait_ready(&mut self) -> Result<()> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line == "ready\n" {
            return Ok(());
        }
        let log = |name| fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        Err(format!(
            "the server does not start\n{}{}",
            log("keeper.log"),
            log("server.log")
        )
        .into())
    }

    /// Stops the server as a crash would, and returns when it is gone.
    pub fn crash(&mut self) -> Result<()> {
        self.order("crash")
    }

    /// Starts the server again; does not wait until it takes connections.
    pub fn start_again(&mut self) -> Result<()> {
        self.order("start")
    }

    fn order(&mut self, command: &str) -> Result<()> {
        let stdin = self.keeper.stdin.as_mut().ok_or("the keeper is gone")?;
        writeln!(stdin, "{command}")?;
        self.wait_ready()
    }

    /// A session of the superuser in the database postgres.
    pub fn connect(&self) -> Result<Client> {
        Ok(Config::new()
            .host_path(&self.socket_dir)
            .user(SUPERUSER)
            .dbname("postgres")
            .connect(NoTls)?)
    }

    /// One of PostgreSQL's own client programs, which sees no PG* variable of the caller.
    pub fn client_program(&self, name: &str) -> Command {
        let mut command = clean(Command::new(self.bindir.join(name)));
        command
            .arg("--host")
            .arg(&self.socket_dir)
            .args(["--username", SUPERUSER]);
        command
    }

    /// Where the data are, and where files of a run may be put.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        if let Err(error) = self.keeper.wait() {
            eprintln!(
                "the server in {} may still run: {error}",
                self.dir.display()
            );
        }
    }
}

/// Neither PG* nor RUST_BACKTRACE, which would put backtraces into the server's errors.
pub fn clean(mut command: Command) -> Command {
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("LC_ALL", "C");
    command
}

/// What pg_config says.
pub fn ask(pg_config: &Path, option: &str) -> Result<PathBuf> {
    let output = Command::new(pg_config).arg(option).output();
    let output = output.map_err(|error| format!("{}: {error}", pg_config.display()))?;
    if !output.status.success() {
        return Err(format!("{} {option} failed", pg_config.display()).into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().into())
}

/// A user's or a group's number.
fn id(args: &[&str]) -> Result<u32> {
    let output = Command::new("id").args(args).output()?;
    let text = String::from_utf8(output.stdout)?;
    Ok(text
        .trim()
        .parse()
        .map_err(|_| format!("id {}: no such user", args.join(" ")))?)
}

/// Cargo's target directory: the one that this program was built into.
fn target_dir() -> Option<PathBuf> {
    Some(
        std::env::current_exe()
            .ok()?
            .parent()?
            .parent()?
            .to_path_buf(),
    )
}

/// A new directory in `parent` that belongs to the servers' user, who can also get there.
pub fn new_dir(parent: &Path, server_user: Option<(u32, u32)>) -> Result<PathBuf> {
    let number = CLUSTERS.fetch_add(1, Ordering::Relaxed);
    let dir = parent.join(format!("leasehold-bench-{}-{number}", std::process::id()));
    fs::create_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))?;
    let mut probe = Command::new("test");
    probe.arg("-w").arg(&dir);
    if let Some((uid, gid)) = server_user {
        chown(&dir, Some(uid), Some(gid))?;
        probe.uid(uid).gid(gid);
    }
    if probe.status()?.success() {
        return Ok(dir);
    }
    fs::remove_dir(&dir)?;
    Err(format!("the user {SERVER_USER} can't reach {}", dir.display()).into())
}
