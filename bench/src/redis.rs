//! The second yardstick: a throwaway Redis server, reached by a unix socket, that persists nothing, and the
//! lock that its documentation recommends: `SET NX PX`, and a script that deletes what it finds to be its own.
//!
//! Invariant: the server and its directory go when this program ends, however it ends; see `cluster`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use crate::Result;
use crate::cluster::{Cluster, clean, new_dir};
use crate::contest::{Load, Variables};

/// Names of each client, as in the scripts for pgbench.
const RESOURCES_PER_CLIENT: u32 = 500;

const RELEASE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end";

/// Argument: the server's directory. It stops when its standard input closes.
const KEEPER: &str = r#"
trap '' HUP INT TERM PIPE
dir=$1
redis-server --port 0 --unixsocket "$dir/socket" --save '' --appendonly no --dir "$dir" \
    >"$dir/log" 2>&1 &
read -r _
kill $!
wait
rm -rf "$dir"
"#;

/// A running server.
pub struct Server {
    dir: PathBuf,
    keeper: Child,
}

impl Server {
    /// None where Redis is not installed.
    pub fn start() -> Result<Option<Self>> {
        let installed = Command::new("redis-server").arg("--version").output();
        if installed.is_err() {
            return Ok(None);
        }
        let dir = new_dir(&std::env::temp_dir(), None)?;
        let keeper = clean(Command::new("sh"))
            .args(["-c", KEEPER, "leasehold-bench-redis"])
            .arg(&dir)
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let server = Server { dir, keeper };
        server.wait_ready()?;
        Ok(Some(server))
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("socket")
    }

    fn wait_ready(&self) -> Result<()> {
        const LIMIT: Duration = Duration::from_secs(20);
        let begin = Instant::now();
        loop {
            let answer = Connection::new(&self.socket()).and_then(|mut c| c.call(&["PING"]));
            match answer {
                Ok(Reply::Status(pong)) if pong == "PONG" => return Ok(()),
                _ if begin.elapsed() < LIMIT => sleep(Duration::from_millis(5)),
                _ => {
                    let log = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
                    return Err(format!("the Redis server does not start\n{log}").into());
                }
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        if let Err(error) = self.keeper.wait() {
            eprintln!(
                "the Redis server in {} may still run: {error}",
                self.dir.display()
            );
        }
    }
}

impl Load for Server {
    /// Each client is a thread. A pass is the two calls, each a round trip.
    fn rate(&self, _: &Cluster, clients: u32, seconds: u32, _: &Variables) -> Result<f64> {
        let (ready, is_over) = (Barrier::new(clients as usize + 1), AtomicBool::new(false));
        thread::scope(|scope| {
            let begin_and_loop = |client| {
                // whoever fails must come to the barrier too
                let holder = Holder::new(&self.socket(), client);
                ready.wait();
                holder?.pass_until(&is_over)
            };
            let threads: Vec<_> = (0..clients)
                .map(|client| scope.spawn(move || begin_and_loop(client)))
                .collect();
            ready.wait();
            let begin = Instant::now();
            sleep(Duration::from_secs(seconds.into()));
            is_over.store(true, Ordering::Relaxed);
            let mut passes = 0;
            for thread in threads {
                passes += thread.join().map_err(|_| "a client of Redis panicked")??;
            }
            Ok(f64::from(passes) / begin.elapsed().as_secs_f64())
        })
    }
}

/// A client that acquires and releases.
struct Holder {
    connection: Connection,
    client: u32,
    /// The name by which the server knows the script.
    release: String,
}

impl Holder {
    fn new(socket: &Path, client: u32) -> Result<Self> {
        let mut connection = Connection::new(socket)?;
        let release = match connection.call(&["SCRIPT", "LOAD", RELEASE])? {
            Reply::Text(name) => name,
            other => return Err(format!("SCRIPT LOAD: {other:?}").into()),
        };
        Ok(Holder {
            connection,
            client,
            release,
        })
    }

    fn pass_until(&mut self, is_over: &AtomicBool) -> Result<u32> {
        let mut passes = 0;
        while !is_over.load(Ordering::Relaxed) {
            let name = format!("bench/{}/{}", self.client, passes % RESOURCES_PER_CLIENT);
            let owner = format!("{}-{passes}", self.client);
            let acquire = ["SET", &name, &owner, "NX", "PX", "30000"];
            expect(self.connection.call(&acquire)?, Reply::Status("OK".into()))?;
            let release = ["EVALSHA", &self.release, "1", &name, &owner];
            expect(self.connection.call(&release)?, Reply::Number(1))?;
            passes += 1;
        }
        Ok(passes)
    }
}

/// A run of calls that did not do their work is no figure.
fn expect(reply: Reply, expected: Reply) -> Result<()> {
    if reply == expected {
        Ok(())
    } else {
        Err(format!("Redis answered {reply:?}, not {expected:?}").into())
    }
}

/// What the calls here are answered with; an error is an error.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Status(String),
    Number(i64),
    Text(String),
    Nothing,
}

/// A connection that speaks RESP 2, as much of it as is needed here.
struct Connection {
    stream: BufReader<UnixStream>,
    request: Vec<u8>,
}

impl Connection {
    fn new(socket: &Path) -> Result<Self> {
        Ok(Connection {
            stream: BufReader::new(UnixStream::connect(socket)?),
            request: Vec::new(),
        })
    }

    fn call(&mut self, words: &[&str]) -> Result<Reply> {
        self.request.clear();
        write!(self.request, "*{}\r\n", words.len())?;
        for word in words {
            write!(self.request, "${}\r\n{word}\r\n", word.len())?;
        }
        self.stream.get_mut().write_all(&self.request)?;
        reply(&mut self.stream)
    }
}

fn reply(stream: &mut impl BufRead) -> Result<Reply> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let line = line.trim_end_matches("\r\n");
    let rest = line.get(1..).unwrap_or_default();
    match line.as_bytes().first() {
        Some(b'+') => Ok(Reply::Status(rest.into())),
        Some(b':') => Ok(Reply::Number(rest.parse()?)),
        Some(b'$') if rest == "-1" => Ok(Reply::Nothing),
        Some(b'$') => {
            // and the end of the line
            let mut text = vec![0; rest.parse::<usize>()? + 2];
            stream.read_exact(&mut text)?;
            text.truncate(text.len() - 2);
            Ok(Reply::Text(String::from_utf8(text)?))
        }
        _ => Err(format!("Redis: {line:?}").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_told_apart() {
        let mut stream = &b"+OK\r\n:1\r\n$5\r\na\r\nbc\r\n$-1\r\n-ERR no\r\n"[..];
        let mut next = || reply(&mut stream);
        assert_eq!(next().unwrap(), Reply::Status("OK".into()));
        assert_eq!(next().unwrap(), Reply::Number(1));
        assert_eq!(next().unwrap(), Reply::Text("a\r\nbc".into()));
        assert_eq!(next().unwrap(), Reply::Nothing);
        assert!(next().unwrap_err().to_string().contains("-ERR no"));
        assert!(next().is_err(), "the end");
    }
}
