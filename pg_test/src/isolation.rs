//! Layer isolation: the races of the contract, step by step in every order, with PostgreSQL's own isolationtester.
//!
//! The specs are in `isolation/specs`, what each must print in `isolation/expected`, and what they share in
//! `isolation/common.sql`. All of it is compiled in. A spec whose output differs leaves it in the run's directory
//! (`--keep`), to be looked at and, where it is right, to become the expected one.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;

use crate::cluster::Db;
use crate::environment::environment;

const COMMON: &str = include_str!("../isolation/common.sql");

macro_rules! specs {
    ($($name:ident),* $(,)?) => {
        $(fn $name() {
            run_spec(
                stringify!($name),
                include_str!(concat!("../isolation/specs/", stringify!($name), ".spec")),
                include_str!(concat!("../isolation/expected/", stringify!($name), ".out")),
            );
        })*
        crate::tests![$($name),*];
    };
}

specs![
    stale_writer_commits_late,
    stale_writer_by_setting,
    lease_over_admits_no_further_writer,
    release_at_commit,
    release_in_savepoint,
    release_against_takeover,
    renew_against_expiry,
    deadline_counts_from_the_commit,
    two_takers,
    two_takers_of_an_expired_lease,
    taker_in_savepoint,
    fence_in_savepoint,
    prepared_writer,
    setting_changes_within_a_statement,
    abort_against_a_reader,
];

fn run_spec(name: &str, spec: &str, expected: &str) {
    let db = Db::bare_on(&crate::cluster::Cluster::shared());
    db.session().exec(COMMON);
    let output = isolationtester(&db, spec);
    if output == expected {
        return;
    }
    let kept = environment().dir.join(format!("{name}.out"));
    fs::write(&kept, &output).expect("the run's directory can be written");
    panic!(
        "{}\nthe whole output: {}",
        difference(expected, &output),
        kept.display()
    );
}

/// Runs a spec against a database, and gives what is printed, errors included.
fn isolationtester(db: &Db, spec: &str) -> String {
    let conninfo = format!(
        "host={} port=5432 user=postgres dbname={}",
        db.cluster.socket_dir().display(),
        db.name
    );
    let mut child = environment()
        .command(program(), db.cluster.dir())
        // seconds, after which a step that hangs is cancelled
        .env("PGISOLATIONTIMEOUT", "30")
        .arg(conninfo)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("isolationtester can be started");
    // it reads all of the spec before it prints anything
    let mut stdin = child.stdin.take().expect("stdin is a pipe");
    stdin
        .write_all(spec.as_bytes())
        .expect("isolationtester reads its spec");
    drop(stdin);
    let output = child
        .wait_with_output()
        .expect("isolationtester can be awaited");
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        text.push_str(&format!("isolationtester: {}\n", output.status));
    }
    text
}

/// Where PGXS has it: it comes with the server's headers.
fn program() -> PathBuf {
    let program = environment()
        .pkglibdir
        .join("pgxs/src/test/isolation/isolationtester");
    assert!(
        program.exists(),
        "there is no {}: on Debian and Ubuntu it is in postgresql-server-dev-NN",
        program.display()
    );
    program
}

/// The first line that differs, with the lines from its permutation on.
fn difference(expected: &str, output: &str) -> String {
    let (expected, output): (Vec<_>, Vec<_>) =
        (expected.lines().collect(), output.lines().collect());
    let at = expected
        .iter()
        .zip(&output)
        .position(|(e, o)| e != o)
        .unwrap_or(expected.len().min(output.len()));
    let start = output[..at]
        .iter()
        .rposition(|line| line.starts_with("starting permutation"))
        .unwrap_or(0);
    let mut text = format!("line {} differs:\n", at + 1);
    for line in &output[start..at] {
        text.push_str(&format!("  {line}\n"));
    }
    for (sign, lines) in [("-", &expected), ("+", &output)] {
        for line in lines.iter().skip(at).take(8) {
            text.push_str(&format!("{sign} {line}\n"));
        }
    }
    text
}
