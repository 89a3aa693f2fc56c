//! The rows that are rates: acquire and release, a refused acquire, a renewal.
//!
//! All scripts of a row have the same structure on the client's side (the same variables, the same
//! number of statements, no BEGIN), and names are put together by the server in all of them, so that
//! what differs is the work asked for. After each run of leasehold the server is asked whether the
//! calls did what they should: a refusal is fast too.

use postgres::Client;

use crate::cluster::Cluster;
use crate::contest::{Competitor, Contest, count, no_check};
use crate::leases::{expect_held, take};
use crate::pgbench::Script;
use crate::report::{Report, Target};
use crate::{Options, Result};

/// Resources of each client, taken in turn. With 32 clients that is 16,000, what the lease table
/// holds by default.
pub const RESOURCES_PER_CLIENT: i64 = 500;
const MAX_CLIENTS: i64 = 32;

pub const ACQUIRE: &str = "\
\\set n (:n + 1) % 500
SELECT acquire_lease('bench/' || :client_id || '/' || :n) AS token \\gset
SELECT release_lease('bench/' || :client_id || '/' || :n, :token);
";

const INSERT: &str = "\
\\set n (:n + 1) % 500
INSERT INTO bench_insert (resource) VALUES ('bench/' || :client_id || '/' || :n);
SELECT 1;
";

const LOCK_TABLE: &str = "\
\\set n (:n + 1) % 500
INSERT INTO bench_lock AS l (resource, holder, token, expires_at) \
VALUES ('bench/' || :client_id || '/' || :n, 'worker', 1, clock_timestamp() + interval '30 s') \
ON CONFLICT (resource) DO UPDATE SET holder = excluded.holder, token = l.token + 1, expires_at = excluded.expires_at \
WHERE l.expires_at <= clock_timestamp() RETURNING token \\gset
UPDATE bench_lock SET expires_at = '-infinity' WHERE resource = 'bench/' || :client_id || '/' || :n AND token = :token;
";

const HELD: &str = "SELECT acquire_lease('bench/held');\n";
const SELECT_1: &str = "SELECT 1;\n";

/// A client's resource is its number: pgbench can hand that over as it is.
const RENEW: &str = "\
\\set token :first + :client_id
SELECT renew_lease(:client_id, :token);
";

const SELECT_1_SET: &str = "\
\\set token :first + :client_id
SELECT 1;
";

/// Durable acquire and release of distinct resources, against one INSERT and against a lock table.
pub fn acquire(options: &Options, cluster: &Cluster, report: &mut Report) -> Result<()> {
    let mut client = cluster.connect()?;
    seed(&mut client)?;
    let prepare = |_: &mut Client, _| Ok(vec![("n", 0)]);
    let acquire = Script::new(cluster, "acquire", ACQUIRE)?;
    let insert = Script::new(cluster, "insert", INSERT)?;
    let lock_table = Script::new(cluster, "lock_table", LOCK_TABLE)?;
    let competitors = [
        Competitor {
            name: "leasehold",
            load: &acquire,
            prepare,
            check: |client, _, _| expect_held(client, "true", 0),
        },
        Competitor {
            name: "one-row INSERT + SELECT 1",
            load: &insert,
            prepare,
            check: no_check,
        },
        Competitor {
            name: "lock table",
            load: &lock_table,
            prepare,
            check: no_check,
        },
    ];
    for clients in [1, 8, 32] {
        let contest = Contest {
            what: format!("durable acquire + release, {}", count(clients)),
            clients,
            competitors: &competitors,
            targets: &[Some(Target::AtLeast(0.85)), Some(Target::AtLeast(1.5))],
        };
        contest.hold(options, cluster, &mut client, report)?;
    }
    Ok(())
}

/// A lease that another holds, so that every call answers NULL; all clients on one resource.
pub fn held(options: &Options, cluster: &Cluster, report: &mut Report) -> Result<()> {
    let mut client = cluster.connect()?;
    let held = Script::new(cluster, "held", HELD)?;
    let select_1 = Script::new(cluster, "select_1", SELECT_1)?;
    let competitors = [
        Competitor {
            name: "leasehold",
            load: &held,
            prepare: |client, _| {
                Ok(vec![(
                    "first",
                    take(client, &["bench/held".into()], "5 min")?,
                )])
            },
            check: |client, _, variables| {
                expect_held(client, &format!("token = {}", variables[0].1), 1)
            },
        },
        Competitor {
            name: "SELECT 1",
            load: &select_1,
            prepare: |_, _| Ok(Vec::new()),
            check: no_check,
        },
    ];
    for clients in [1, 32] {
        let contest = Contest {
            what: format!("acquire of a held lease, {}", count(clients)),
            clients,
            competitors: &competitors,
            targets: &[Some(Target::AtLeast(0.85))],
        };
        contest.hold(options, cluster, &mut client, report)?;
    }
    Ok(())
}

/// Each client renews its own lease.
pub fn renew(options: &Options, cluster: &Cluster, report: &mut Report) -> Result<()> {
    let mut client = cluster.connect()?;
    let renew = Script::new(cluster, "renew", RENEW)?;
    let select_1 = Script::new(cluster, "select_1_set", SELECT_1_SET)?;
    let competitors = [
        Competitor {
            name: "leasehold",
            load: &renew,
            prepare: |client, clients| {
                let resources: Vec<String> =
                    (0..clients).map(|number| number.to_string()).collect();
                Ok(vec![("first", take(client, &resources, "30 s")?)])
            },
            check: |client, clients, _| {
                expect_held(client, "renewed_at > granted_at", clients.into())
            },
        },
        Competitor {
            name: "SELECT 1",
            load: &select_1,
            prepare: |_, _| Ok(vec![("first", 1)]),
            check: no_check,
        },
    ];
    for clients in [1, 8, 32] {
        let contest = Contest {
            what: format!("renew, {}", count(clients)),
            clients,
            competitors: &competitors,
            targets: &[Some(Target::AtLeast(0.85))],
        };
        contest.hold(options, cluster, &mut client, report)?;
    }
    Ok(())
}

/// Acquires and releases all resources of the scripts once.
pub fn touch(client: &mut Client) -> Result<()> {
    for number in 0..MAX_CLIENTS {
        // a transaction each: one transaction can't hold the locks of all of them
        client.execute(
            "SELECT release_lease(resource, acquire_lease(resource))
             FROM (SELECT 'bench/' || $1::bigint || '/' || n FROM generate_series(0, $2::bigint - 1) AS n) AS r (resource)",
            &[&number, &RESOURCES_PER_CLIENT],
        )?;
    }
    Ok(())
}

/// Every resource is known to each competitor before the first round, so that none measures first touches.
fn seed(client: &mut Client) -> Result<()> {
    client.batch_execute(&format!(
        "CREATE TABLE bench_insert (
             id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
             resource text NOT NULL,
             at timestamptz NOT NULL DEFAULT clock_timestamp());
         CREATE TABLE bench_lock (
             resource text PRIMARY KEY,
             holder text NOT NULL,
             token bigint NOT NULL,
             expires_at timestamptz NOT NULL);
         INSERT INTO bench_lock
             SELECT 'bench/' || client || '/' || n, 'worker', 1, '-infinity'
             FROM generate_series(0, {MAX_CLIENTS} - 1) AS client, generate_series(0, {RESOURCES_PER_CLIENT} - 1) AS n;
         ANALYZE bench_lock"
    ))?;
    touch(client)
}
