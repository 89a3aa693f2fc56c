//! The rows about leases in memory only (`leasehold.durability = memory`), against what a session would use
//! that wants no more than to exclude others: an advisory lock. And beside them Redis, the usual lock service.
//!
//! An advisory lock is of a number. Who has names hashes them, so ours is held against that; the lock of a bare
//! number is there for information. So is Redis: its clients are threads of this program instead of pgbench.

use crate::cluster::Cluster;
use crate::contest::{Competitor, Contest, count, no_check};
use crate::leases::expect_held;
use crate::pgbench::Script;
use crate::report::{Report, Target};
use crate::{Options, Result, rates, redis};

const MEMORY: &str = "-c leasehold.durability=memory";

const ADVISORY: &str = "\
\\set n (:n + 1) % 500
SELECT pg_try_advisory_lock(hashtextextended('bench/' || :client_id || '/' || :n, 0)) AS token \\gset
SELECT pg_advisory_unlock(hashtextextended('bench/' || :client_id || '/' || :n, 0));
";

const ADVISORY_NUMBER: &str = "\
\\set n (:n + 1) % 500
SELECT pg_try_advisory_lock(:client_id, :n) AS token \\gset
SELECT pg_advisory_unlock(:client_id, :n);
";

/// Acquire and release of distinct resources, on a server of its own where nothing else fills the table.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let cluster = Cluster::with_leasehold(&options.pg_config, &[])?;
    let mut client = cluster.connect()?;
    client.batch_execute("SET leasehold.durability = memory")?;
    rates::touch(&mut client)?;
    let acquire = Script::new(&cluster, "acquire", rates::ACQUIRE)?.with_settings(MEMORY);
    let advisory = Script::new(&cluster, "advisory", ADVISORY)?.with_settings(MEMORY);
    let number = Script::new(&cluster, "number", ADVISORY_NUMBER)?.with_settings(MEMORY);
    let redis = redis::Server::start()?;
    let competitor = |name, load| Competitor {
        name,
        load,
        prepare: |_, _| Ok(vec![("n", 0)]),
        check: no_check,
    };
    let mut competitors = vec![
        Competitor {
            check: |client, _, _| expect_held(client, "true", 0),
            ..competitor("leasehold", &acquire)
        },
        competitor("advisory lock of the hashed name", &advisory),
        competitor("advisory lock of a number", &number),
    ];
    match &redis {
        Some(redis) => competitors.push(competitor("Redis, SET NX PX + script", redis)),
        None => eprintln!("redis-server is not installed: its rows are left out"),
    }
    for clients in [1, 8, 32] {
        let contest = Contest {
            what: format!("acquire + release in memory, {}", count(clients)),
            clients,
            competitors: &competitors,
            targets: &[Some(Target::AtLeast(0.95)), None, None],
        };
        contest.hold(options, &cluster, &mut client, report)?;
    }
    Ok(())
}
