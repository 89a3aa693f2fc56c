//! Tests of leasehold's contract on real PostgreSQL clusters, seen from a client.
//!
//! `leasehold-pg-test [FILTER] [--layer NAME] [--pg-config PATH] [--list] [--keep]`. The extension has to be
//! installed in that PostgreSQL. Tests come in layers, listed in `LAYERS`; FILTER is a part of `layer::test`.

mod awaiting;
mod breaks;
mod chaos;
mod cluster;
mod copies;
mod copying;
mod crash;
mod docs;
mod environment;
mod fence_templates;
mod fence_writes;
mod harness;
mod isolation;
mod isolation_races;
mod leases;
mod leaving;
mod ledger;
mod marks;
mod measured;
mod memory;
mod metadata;
mod parallel;
mod partitions;
mod pgbouncer;
mod pipeline;
mod portals;
mod present;
mod process;
mod promotion;
mod queueing;
mod quota;
mod readme;
mod recorder;
mod requests;
mod rights;
mod ring;
mod rules;
mod runner;
mod search_path;
mod seen;
mod server;
mod session;
mod shedding;
mod sql;
mod stalled;
mod standby;
mod sweep;
mod telling;
mod verdicts;
mod waiting;
mod watchdog;
mod watching;
mod wire;
mod xact;
mod zombies;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use environment::Environment;
use runner::Layer;

/// How long a test without crashes may take before it counts as hanging.
const USUAL: Duration = Duration::from_secs(180);

/// The same for a test with many restarts or promotions.
const CHAOS: Duration = Duration::from_secs(600);

const LAYERS: &[Layer] = &[
    Layer {
        name: "harness",
        about: "this program itself: servers start, stop, die and are awaited",
        limit: USUAL,
        tests: &[harness::TESTS],
    },
    Layer {
        name: "sql",
        about: "the calls and their arguments",
        limit: USUAL,
        tests: &[sql::TESTS],
    },
    Layer {
        name: "fence",
        about: "every way to write, and which resource a row belongs to",
        limit: USUAL,
        tests: &[
            fence_writes::TESTS,
            fence_templates::TESTS,
            partitions::TESTS,
            verdicts::TESTS,
        ],
    },
    Layer {
        name: "present",
        about: "under which token a transaction writes",
        limit: USUAL,
        tests: &[present::TESTS],
    },
    Layer {
        name: "xact",
        about: "transactions, savepoints, errors, isolation levels, PREPARE TRANSACTION, cursors, pipelines",
        limit: USUAL,
        tests: &[
            xact::TESTS,
            portals::TESTS,
            pipeline::TESTS,
            parallel::TESTS,
        ],
    },
    Layer {
        name: "server",
        about: "install, remove, restart, settings, roles, a full table, a pooler, a standby",
        limit: USUAL,
        tests: &[
            server::TESTS,
            marks::TESTS,
            sweep::TESTS,
            ledger::TESTS,
            search_path::TESTS,
            pgbouncer::TESTS,
        ],
    },
    Layer {
        name: "zombies",
        about: "who is ended when a lease is over, and who never is",
        limit: USUAL,
        tests: &[zombies::TESTS, stalled::TESTS],
    },
    Layer {
        name: "wait",
        about: "who waits, in which order, and who is refused; retried requests, metadata, breaks",
        limit: USUAL,
        tests: &[
            waiting::TESTS,
            leaving::TESTS,
            watching::TESTS,
            awaiting::TESTS,
            shedding::TESTS,
            requests::TESTS,
            metadata::TESTS,
            breaks::TESTS,
        ],
    },
    Layer {
        name: "rights",
        about: "who may acquire what, and how much",
        limit: USUAL,
        tests: &[rights::TESTS, rules::TESTS, quota::TESTS],
    },
    Layer {
        name: "seen",
        about: "what is counted, and what the flight recorder tells",
        limit: USUAL,
        tests: &[
            seen::TESTS,
            measured::TESTS,
            recorder::TESTS,
            telling::TESTS,
            ring::TESTS,
        ],
    },
    Layer {
        name: "memory",
        about: "leases that write nothing, and what is done after they were lost",
        limit: USUAL,
        tests: &[memory::TESTS],
    },
    Layer {
        name: "copies",
        about: "dumps, templates, upgrades, backups and promotions: which leases live on, and tokens rise; standbys",
        limit: USUAL,
        tests: &[copies::TESTS, promotion::TESTS, standby::TESTS],
    },
    Layer {
        name: "isolation",
        about: "races, step by step in every order",
        limit: USUAL,
        tests: &[isolation::TESTS, isolation_races::TESTS],
    },
    Layer {
        name: "crash",
        about: "kill -9 and immediate restarts under load, checked by what clients saw; a wall clock that jumps",
        limit: USUAL,
        tests: &[crash::TESTS, crash::wall_clock::TESTS],
    },
    Layer {
        name: "chaos",
        about: "everything at once, on a primary and on pairs of servers: kills, stops, promotions, steps of the wall clock",
        limit: CHAOS,
        tests: &[chaos::TESTS],
    },
    Layer {
        name: "readme",
        about: "README.md shows what happens",
        limit: USUAL,
        tests: &[readme::TESTS],
    },
    Layer {
        name: "docs",
        about: "the page for the person on call, the exporter's queries, the dashboard",
        limit: USUAL,
        tests: &[docs::TESTS],
    },
];

const USAGE: &str = "usage: leasehold-pg-test [FILTER] [--layer NAME] [--pg-config PATH] [--list] [--keep] [--chaos]";

#[derive(Default)]
struct Options {
    filter: Option<String>,
    layer: Option<String>,
    pg_config: Option<PathBuf>,
    list: bool,
    keep: bool,
    chaos: bool,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options::default();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--layer" => options.layer = Some(args.next().ok_or(USAGE)?),
            "--pg-config" => options.pg_config = Some(args.next().ok_or(USAGE)?.into()),
            "--list" => options.list = true,
            // keeps the logs and the data of servers that were not stopped by their test
            "--keep" => options.keep = true,
            // no tests, but the long run of `make chaos`
            "--chaos" => options.chaos = true,
            _ if arg.starts_with('-') || options.filter.is_some() => return Err(USAGE.to_owned()),
            _ => options.filter = Some(arg),
        }
    }
    Ok(options)
}

/// The chosen tests' number by layer; an error where there is none, so that a wrong name can't pass for success.
fn choose(options: &Options) -> Result<Vec<&'static Layer>, String> {
    let named = |layer: &&Layer| {
        options
            .layer
            .as_deref()
            .is_none_or(|name| name == layer.name)
    };
    let chosen = LAYERS
        .iter()
        .filter(named)
        .filter(|layer| layer.tests().any(|(name, _)| wanted(options, layer, name)));
    let chosen: Vec<_> = chosen.collect();
    if chosen.is_empty() {
        Err("no test matches".to_owned())
    } else {
        Ok(chosen)
    }
}

fn wanted(options: &Options, layer: &Layer, name: &str) -> bool {
    options
        .filter
        .as_deref()
        .is_none_or(|filter| format!("{}::{name}", layer.name).contains(filter))
}

fn list(options: &Options, layers: &[&Layer]) {
    for layer in layers {
        println!("layer {}: {}", layer.name, layer.about);
        for (name, _) in layer
            .tests()
            .filter(|(name, _)| wanted(options, layer, name))
        {
            println!("    {}::{name}", layer.name);
        }
    }
}

fn run(options: &Options) -> Result<bool, String> {
    let layers = choose(options)?;
    if options.list {
        list(options, &layers);
        return Ok(true);
    }
    let pg_config = options
        .pg_config
        .clone()
        .unwrap_or_else(|| "pg_config".into());
    let environment = Environment::set_up(&pg_config)?;
    watchdog::set_up(environment, options.keep)?;
    if options.chaos {
        let clean = chaos::long_run();
        watchdog::finish();
        return clean;
    }
    runner::set_up();
    let mut all_passed = true;
    for layer in layers {
        let (passed, failed) = runner::run(layer, |full| {
            options.filter.as_deref().is_none_or(|f| full.contains(f))
        });
        println!("layer {}: {passed} passed, {failed} failed", layer.name);
        all_passed &= failed == 0;
    }
    cluster::Cluster::forget_shared();
    watchdog::finish();
    if options.keep {
        println!("kept {}", environment.dir.display());
    }
    Ok(all_passed)
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, args @ ..] = &args[..]
        && mode == chaos::client::MODE
    {
        return chaos::client::main(args);
    }
    match parse(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("leasehold-pg-test: {message}");
            ExitCode::from(2)
        }
    }
}
