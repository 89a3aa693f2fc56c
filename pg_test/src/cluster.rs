//! A throwaway PostgreSQL cluster with leasehold preloaded, on a unix socket in a directory of its own.
//!
//! Invariants: the postmaster is a direct child of this program, so its end is awaited and reaped, never guessed. A
//! cluster is stopped and its data removed when its `Cluster` is dropped; the watchdog does it where this program
//! does not get so far. The log stays until the end of the run. All methods take `&self`, so that a test may use a
//! cluster from several threads; starting and stopping is one thread's at a time.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use postgres::Config;

use crate::environment::{environment, run};
use crate::process::{Process, Signal};
use crate::session::{DbErr, LIMIT, Session};
use crate::watchdog;

/// Pause between two looks at a condition that has no event to wait for.
const PAUSE: Duration = Duration::from_millis(5);

static CLUSTERS: AtomicU32 = AtomicU32::new(0);
static LOGS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// How a server is told to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Waits for all sessions to leave.
    Smart,
    /// Ends all sessions, with a shutdown checkpoint.
    Fast,
    /// Ends at once, as after a crash: recovery at the next start.
    Immediate,
}

impl Stop {
    fn signal(self) -> Signal {
        match self {
            Self::Smart => Signal::TERM,
            Self::Fast => Signal::INT,
            Self::Immediate => Signal::QUIT,
        }
    }
}

pub struct Builder {
    preload: bool,
    conf: Vec<(String, String)>,
}

impl Builder {
    /// A line for postgresql.conf; the value is quoted here.
    pub fn conf(mut self, name: &str, value: &str) -> Self {
        self.conf.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Several of them.
    pub fn confs(self, settings: &[(&str, &str)]) -> Self {
        settings
            .iter()
            .fold(self, |builder, (name, value)| builder.conf(name, value))
    }

    /// Leaves shared_preload_libraries empty.
    pub fn without_preload(mut self) -> Self {
        self.preload = false;
        self
    }

    /// Makes the cluster and starts it; returns when it takes connections.
    pub fn start(self) -> Cluster {
        let cluster = self.create();
        cluster.start();
        cluster
    }

    /// Makes the cluster without starting it.
    pub fn create(self) -> Cluster {
        self.create_as(|data, dir| {
            drop(run(environment()
                .command("cp", dir)
                .arg("-a")
                .arg(template())
                .arg(data)))
        })
    }

    /// The same with a data directory that `fill` makes.
    pub fn create_as(self, fill: impl FnOnce(&Path, &Path)) -> Cluster {
        let env = environment();
        let _starting = watchdog::starting();
        let number = CLUSTERS.fetch_add(1, Ordering::Relaxed);
        let dir = env.dir.join(number.to_string());
        let socket_dir = env.socket_dir.join(number.to_string());
        env.make_dir(&dir);
        env.make_dir(&socket_dir);
        let data = dir.join("data");
        fill(&data, &dir);
        let cluster = Cluster {
            dir,
            data,
            socket_dir,
            variables: Mutex::default(),
            server: Mutex::new(None),
            monitor: Mutex::new(None),
        };
        LOGS.lock()
            .unwrap_or_else(|e| e.into_inner())
            .push(cluster.log_file());
        cluster.configure(&self.lines(&cluster.socket_dir));
        cluster
    }

    fn lines(&self, socket_dir: &Path) -> String {
        let mut lines = String::new();
        let mut line = |name: &str, value: &str| {
            writeln!(lines, "{name} = '{}'", value.replace('\'', "''"))
                .expect("a string takes what is written");
        };
        line("listen_addresses", "");
        line("unix_socket_directories", &socket_dir.to_string_lossy());
        if self.preload {
            line("shared_preload_libraries", "leasehold");
        }
        // in the data directory, so that a killed server leaves nothing elsewhere
        line("dynamic_shared_memory_type", "mmap");
        // kill -9 of a server loses nothing that the operating system has taken, so fsync would only cost time
        line("fsync", "off");
        line("max_prepared_transactions", "20");
        line("deadlock_timeout", "100ms");
        line("timezone", "UTC");
        line("log_timezone", "UTC");
        line("log_line_prefix", "%m [%p] %d %e ");
        // another build of leasehold, found before the installed one: for `pg_test/mutate`
        if let Some(dir) = std::env::var_os("LEASEHOLD_LIBRARY_DIR") {
            line(
                "dynamic_library_path",
                &format!("{}:$libdir", dir.to_string_lossy()),
            );
        }
        // the last one counts
        self.conf.iter().for_each(|(name, value)| line(name, value));
        lines
    }
}

pub struct Cluster {
    dir: PathBuf,
    data: PathBuf,
    socket_dir: PathBuf,
    variables: Mutex<Vec<(String, String)>>,
    server: Mutex<Option<Child>>,
    monitor: Mutex<Option<Session>>,
}

impl Cluster {
    pub fn builder() -> Builder {
        Builder {
            preload: true,
            conf: Vec::new(),
        }
    }

    /// The server that tests share which need no settings and no crash of their own.
    pub fn shared() -> Arc<Self> {
        let mut shared = SHARED.lock().unwrap_or_else(|e| e.into_inner());
        shared
            .get_or_insert_with(|| {
                // tests of zombies have servers of their own; nobody else's session is ended
                let builder = Self::builder().conf("leasehold.zombie_grace", "1h");
                Arc::new(builder.start())
            })
            .clone()
    }

    /// Gives the shared server up: it stops when its last user is gone, the next one gets a new one.
    pub fn forget_shared() {
        drop(SHARED.lock().unwrap_or_else(|e| e.into_inner()).take());
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    pub fn socket_dir(&self) -> &Path {
        &self.socket_dir
    }

    /// How to connect as superuser to the database postgres; to be changed as needed.
    pub fn config(&self) -> Config {
        let mut config = Config::new();
        config
            .host_path(&self.socket_dir)
            .port(5432)
            .user("postgres")
            .dbname("postgres");
        config.application_name("pg_test").connect_timeout(LIMIT);
        config
    }

    #[track_caller]
    pub fn connect(&self) -> Session {
        self.connect_with(&self.config())
    }

    #[track_caller]
    pub fn connect_db(&self, database: &str) -> Session {
        self.connect_with(self.config().dbname(database))
    }

    #[track_caller]
    pub fn connect_as(&self, role: &str, database: &str) -> Session {
        self.connect_with(self.config().user(role).dbname(database))
    }

    #[track_caller]
    pub fn connect_with(&self, config: &Config) -> Session {
        Session::try_connect(config).unwrap_or_else(|e| panic!("cannot connect: {e}"))
    }

    /// Adds lines to postgresql.conf; they count from the next start or reload.
    pub fn configure(&self, lines: &str) {
        use std::io::Write;
        let path = self.data.join("postgresql.conf");
        let file = File::options().append(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(lines.as_bytes()));
        written.unwrap_or_else(|e| panic!("cannot write {}: {e}", path.display()));
    }

    /// A physical standby of this server, started and streaming.
    pub fn standby(&self) -> Self {
        let standby = Self::builder().standby_of(self);
        standby.start();
        standby
    }

    /// Sets an environment variable for the server; it counts from the next start.
    pub fn set_variable(&self, name: &str, value: &str) {
        let mut variables = self.variables.lock().unwrap_or_else(|e| e.into_inner());
        variables.push((name.to_owned(), value.to_owned()));
    }

    /// Starts the server and waits until it takes connections.
    pub fn start(&self) {
        self.start_only();
        self.wait_ready();
    }

    /// Starts the server without waiting for it.
    pub fn start_only(&self) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_file())
            .expect("the log can be written");
        let errors = log.try_clone().expect("the log can be written");
        let mut command = environment().pg_command("postgres", &self.dir);
        command
            .arg("-D")
            .arg(&self.data)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors);
        command.envs(
            self.variables
                .lock()
                .unwrap_or_else(|e| e.into_inner())
                .iter()
                .cloned(),
        );
        let mut server = self.server();
        assert!(server.is_none(), "the server runs already");
        *server = Some(
            command
                .spawn()
                .unwrap_or_else(|e| panic!("cannot start a server: {e}")),
        );
    }

    /// Waits until the server takes connections; panics where it has ended instead.
    pub fn wait_ready(&self) {
        let config = self.config();
        let outcome = wait_for("a server to take connections", || {
            if let Some(status) = self.server().as_mut().map(|server| server.try_wait()) {
                match status {
                    Ok(None) => {}
                    ended => return Some(Err(format!("the server has ended: {ended:?}"))),
                }
            }
            Session::try_connect(&config).ok().map(|_| Ok(()))
        });
        outcome.unwrap_or_else(|e: String| panic!("{e}\n{}", tail(&self.log(), 30)));
    }

    /// Waits for the end of a server that is ending by itself, and gives its exit status.
    pub fn wait_stopped(&self) -> std::process::ExitStatus {
        self.close_monitor();
        let mut server = self.server().take().expect("the server runs");
        let gone = Process::open(server.id().cast_signed()).wait_gone(LIMIT);
        assert!(
            gone,
            "the server has not stopped\n{}",
            tail(&self.log(), 30)
        );
        server.wait().expect("a child can be awaited")
    }

    pub fn stop(&self, how: Stop) {
        self.close_monitor();
        Process::open(self.postmaster_pid()).signal(how.signal());
        self.wait_stopped();
    }

    pub fn restart(&self, how: Stop) {
        self.stop(how);
        self.start();
    }

    pub fn is_running(&self) -> bool {
        self.server().is_some()
    }

    pub fn postmaster_pid(&self) -> i32 {
        self.server()
            .as_ref()
            .expect("the server runs")
            .id()
            .cast_signed()
    }

    /// SIGKILL to the postmaster, and the wait until it and all its children are gone: a start before that would
    /// be refused.
    pub fn kill_postmaster(&self) {
        let pid = self.postmaster_pid();
        let children = Process::children_of(pid);
        Process::open(pid).signal(Signal::KILL);
        self.wait_stopped();
        for child in children {
            assert!(
                child.wait_gone(LIMIT),
                "process {} has outlived its postmaster",
                child.pid
            );
        }
    }

    /// A signal to one backend of this server.
    pub fn kill_backend(&self, pid: i32, signal: Signal) {
        Process::open(pid).signal(signal);
    }

    /// SIGKILL to one backend, the wait until the postmaster has ended all others for it, and the wait until it
    /// takes connections again.
    pub fn crash_backend(&self, pid: i32) {
        self.close_monitor();
        let children = Process::children_of(self.postmaster_pid());
        self.kill_backend(pid, Signal::KILL);
        for child in children {
            assert!(
                child.wait_gone(LIMIT),
                "process {} has outlived the crash of another",
                child.pid
            );
        }
        self.wait_ready();
    }

    /// Waits until the backend waits for a heavyweight lock.
    pub fn wait_until_blocked(&self, pid: i32) {
        self.wait_sql(
            &format!("SELECT cardinality(pg_blocking_pids({pid})) > 0"),
            &format!("backend {pid} to wait for a lock"),
        );
    }

    /// Waits until the backend has left.
    pub fn wait_until_left(&self, pid: i32) {
        self.wait_sql(
            &format!("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})"),
            &format!("backend {pid} to leave"),
        );
    }

    /// Waits until a query on the database postgres says true.
    pub fn wait_sql(&self, sql: &str, what: &str) {
        wait_for(what, || self.monitor(sql).then_some(()));
    }

    /// Waits until a session that has answered is seen to wait for its client.
    pub fn wait_until_idle(&self, pid: i32) {
        let sql = format!(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'ClientRead')"
        );
        self.wait_sql(&sql, "the session to be idle");
    }

    /// What the server has logged since it was made.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_file()).unwrap_or_default()).into_owned()
    }

    pub fn log_file(&self) -> PathBuf {
        self.dir.join("log")
    }

    fn monitor(&self, sql: &str) -> bool {
        let mut monitor = self.monitor.lock().unwrap_or_else(|e| e.into_inner());
        monitor.get_or_insert_with(|| self.connect()).one(sql)
    }

    /// A session of ours must not keep a smart stop waiting, nor be used across a restart.
    fn close_monitor(&self) {
        drop(
            self.monitor
                .lock()
                .unwrap_or_else(|e| e.into_inner())
                .take(),
        );
    }

    /// Gives back what a killed postmaster that was not started again has left: line 7 of its pid file names it.
    fn free_shared_memory(&self) {
        let pid_file = fs::read_to_string(self.data.join("postmaster.pid")).unwrap_or_default();
        if let Some(id) = pid_file
            .lines()
            .nth(6)
            .and_then(|line| line.split_whitespace().nth(1))
        {
            let _ = environment()
                .command("ipcrm", &self.dir)
                .args(["-m", id])
                .status();
        }
    }

    fn server(&self) -> MutexGuard<'_, Option<Child>> {
        self.server.lock().unwrap_or_else(|e| e.into_inner())
    }
}

static SHARED: Mutex<Option<Arc<Cluster>>> = Mutex::new(None);

impl Drop for Cluster {
    fn drop(&mut self) {
        self.close_monitor();
        if let Some(mut server) = self.server().take() {
            let process = Process::open(server.id().cast_signed());
            process.signal(Signal::QUIT);
            if !process.wait_gone(LIMIT) {
                process.signal(Signal::KILL);
            }
            let _ = server.wait();
        }
        self.free_shared_memory();
        let _ = fs::remove_dir_all(&self.data);
    }
}

/// The data directory that clusters are copies of, made once per run.
fn template() -> &'static Path {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let dir = environment().dir.join("template");
        initdb(&dir);
        dir
    })
}

/// Makes a data directory. Only here a cluster gets a system identifier.
pub fn initdb(data: &Path) {
    let env = environment();
    let mut initdb = env.pg_command("initdb", &env.dir);
    initdb.args([
        "--username=postgres",
        "--auth=trust",
        "--encoding=UTF8",
        "--locale=C.UTF-8",
    ]);
    // small segments make small copies
    initdb
        .args(["--no-sync", "--no-instructions", "--wal-segsize=1", "-D"])
        .arg(data);
    run(&mut initdb);
}

/// Looks at a condition until it holds; panics after `LIMIT`.
#[track_caller]
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {LIMIT:?} for {what}");
        thread::sleep(PAUSE);
    }
}

/// The logs of this run's servers with their present lengths, for `log_since`.
pub fn log_marks() -> Vec<(PathBuf, u64)> {
    let logs = LOGS.lock().unwrap_or_else(|e| e.into_inner());
    logs.iter()
        .map(|path| (path.clone(), fs::metadata(path).map_or(0, |m| m.len())))
        .collect()
}

/// The tail of what each server has logged since the marks were taken.
pub fn log_since(marks: &[(PathBuf, u64)]) -> String {
    let mut text = String::new();
    for (path, length) in log_marks() {
        let from = marks
            .iter()
            .find(|(marked, _)| *marked == path)
            .map_or(0, |(_, length)| *length);
        if length > from {
            let bytes = fs::read(&path).unwrap_or_default();
            let new = bytes
                .get(usize::try_from(from).unwrap_or(0)..)
                .unwrap_or_default();
            writeln!(text, "-- log {}", path.display()).expect("a string takes what is written");
            text.push_str(&tail(&String::from_utf8_lossy(new), 40));
        }
    }
    text
}

pub fn tail(text: &str, lines_max: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(lines_max);
    lines[from..]
        .iter()
        .map(|line| format!("{line}\n"))
        .collect()
}

/// A database of its own on a cluster, with the extension.
pub struct Db {
    pub cluster: Arc<Cluster>,
    pub name: String,
}

impl Db {
    /// A new one on the shared cluster.
    pub fn new() -> Self {
        Self::on(&Cluster::shared())
    }

    pub fn on(cluster: &Arc<Cluster>) -> Self {
        let db = Self::bare_on(cluster);
        db.session().exec("CREATE EXTENSION leasehold");
        db
    }

    /// On a server of its own with these settings, where nobody is ended as a zombie unless they say so.
    pub fn with(settings: &[(&str, &str)]) -> Self {
        let builder = Cluster::builder().conf("leasehold.zombie_grace", "1h");
        Self::on(&Arc::new(builder.confs(settings).start()))
    }

    /// One without the extension.
    pub fn bare_on(cluster: &Arc<Cluster>) -> Self {
        static DATABASES: AtomicU32 = AtomicU32::new(0);
        let name = format!("db{}", DATABASES.fetch_add(1, Ordering::Relaxed));
        cluster.connect().exec(&format!("CREATE DATABASE {name}"));
        Self {
            cluster: cluster.clone(),
            name,
        }
    }

    #[track_caller]
    pub fn session(&self) -> Session {
        self.cluster.connect_db(&self.name)
    }

    #[track_caller]
    pub fn session_as(&self, role: &str) -> Session {
        self.cluster.connect_as(role, &self.name)
    }

    /// With options as in the `options` parameter of a connection string.
    #[track_caller]
    pub fn session_with_options(&self, options: &str) -> Session {
        self.try_session_with_options(options)
            .unwrap_or_else(|e| panic!("cannot connect: {e}"))
    }

    pub fn try_session_with_options(&self, options: &str) -> Result<Session, DbErr> {
        Session::try_connect(self.cluster.config().dbname(&self.name).options(options))
    }

    /// A new login role without rights but those of everyone, and the right to make tables here.
    pub fn role(&self) -> String {
        static ROLES: AtomicU32 = AtomicU32::new(0);
        let role = format!("role{}", ROLES.fetch_add(1, Ordering::Relaxed));
        self.session().exec(&format!(
            "CREATE ROLE {role} LOGIN; GRANT CREATE ON SCHEMA public TO {role}"
        ));
        role
    }
}
