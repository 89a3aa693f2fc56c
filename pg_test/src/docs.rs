//! Layer docs: docs/on-call.md answers what it promises to, and what is in monitoring/ fits the server and itself.
//!
//! The queries of the page are asked as a role with the rights that the page gives, in a situation in which the answer
//! is known. They are about the resource `invoice:42` and the role `billing`. The exporter's queries run as the role
//! that monitoring/README.md makes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use yaml_rust2::{Yaml, YamlLoader};

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::copying::{Pair, Promoted};
use crate::environment::{environment, run};
use crate::session::{Pending, Session};

crate::tests![
    page_runs_in_psql,
    page_links_lead_somewhere,
    holder_his_session_and_waiters_are_found,
    what_holds_a_draining_resource_up_is_found,
    refused_writes_are_explained,
    ended_session_is_found,
    rights_and_quotas_are_explained,
    leases_of_before_a_restart_are_told_apart,
    failover_is_explained,
    lease_is_broken_and_a_client_kept_out,
    ledger_is_measured,
    metrics_are_those_of_the_queries,
    metrics_tell_what_is,
    dashboard_uses_the_metrics,
    dashboard_can_be_imported,
];

const WHO: &str = "Who holds it, since when and until when?";
const SESSION: &str = "Which session is that, and is it alive?";
const WAITERS: &str = "Who waits, how long, and in which order?";
const WHY: &str = "Why can't I get it?";
const ALLOWED: &str = "Is its role allowed?";
const QUOTA: &str = "Is its quota used up?";
const LEASED: &str = "What is leased right now?";
const DRAINING: &str = "It is draining: which transactions hold it up?";
const REFUSED: &str = "Why was this write refused?";
const STORY: &str = "What has happened to this resource?";
const RECENT: &str = "What happened in the last ten minutes?";
const ENDED: &str = "Whom has leasehold ended?";
const TOKENS: &str = "Who had which token when?";
const FAILOVER: &str = "What did the failover do?";
const STANDBY: &str = "Is the standby ready to be promoted?";
const OVERLOAD: &str = "Is it overloaded?";
const FREE: &str = "How do I free it now?";
const KEEP_OUT: &str = "How do I keep a client out?";
const LEDGER: &str = "Are old ledger rows swept, and how large is the ledger?";

const RESOURCE: &str = "invoice:42";

fn file(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()))
}

/// The SQL blocks of a document, with the headings that they stand under.
struct Page(Vec<(String, String)>);

impl Page {
    fn read(path: &str) -> Self {
        let (text, mut heading, mut blocks) = (file(path), String::new(), Vec::new());
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if let Some(title) = line.strip_prefix("## ") {
                title.clone_into(&mut heading);
            }
            if let Some(language) = line.strip_prefix("```") {
                let body: Vec<&str> = lines.by_ref().take_while(|l| *l != "```").collect();
                if language == "sql" {
                    blocks.push((heading.clone(), body.join("\n")));
                }
            }
        }
        assert!(!blocks.is_empty(), "{path} has no SQL");
        Self(blocks)
    }

    /// The block of that place under a heading, without the commands and variables that are psql's.
    #[track_caller]
    fn block(&self, heading: &str, place: usize, resource: &str) -> String {
        let mut blocks = self.0.iter().filter(|(under, _)| under == heading);
        let (_, sql) = blocks
            .nth(place)
            .unwrap_or_else(|| panic!("there is no block {place} under \"{heading}\""));
        let sql = sql
            .lines()
            .filter(|line| !line.starts_with('\\'))
            .collect::<Vec<_>>()
            .join("\n");
        sql.replace(":'resource'", &format!("'{resource}'"))
            .replace(":'role'", "'billing'")
    }
}

/// A database with a fenced table, a role whose clients do the work, and somebody who is on call.
struct Desk {
    db: Db,
    page: Page,
}

impl Desk {
    fn with(settings: &[(&str, &str)]) -> Self {
        let builder = Cluster::builder().conf("leasehold.zombie_grace", "1h");
        Self::on(Db::on(&Arc::new(builder.confs(settings).start())))
    }

    fn on(db: Db) -> Self {
        let page = Page::read("docs/on-call.md");
        let mut s = db.session();
        s.exec(
            "CREATE ROLE billing LOGIN; CREATE ROLE oncall LOGIN;
             CREATE TABLE invoices (id int PRIMARY KEY, amount int, lease_token bigint);
             INSERT INTO invoices VALUES (42, 100);
             GRANT ALL ON invoices TO billing;
             SELECT fence_table('invoices', 'invoice:{id}', 'lease_token')",
        );
        s.exec(&page.block("", 1, RESOURCE));
        Self { db, page }
    }

    /// A client of the role that does the work.
    fn client(&self) -> Session {
        let mut config = self.db.cluster.config();
        config.user("billing").dbname(&self.db.name);
        self.db
            .cluster
            .connect_with(config.application_name("biller"))
    }

    /// A client that waits for the resource, as the last one.
    fn waiter(&self) -> Pending {
        self.db.queued(
            self.client(),
            RESOURCE,
            "SELECT acquire_lease('invoice:42', 'next', wait => '1min')",
        )
    }

    /// How many rows of an answer are as the condition says.
    #[track_caller]
    fn count_about(&self, resource: &str, question: &str, place: usize, condition: &str) -> i64 {
        let sql = self.page.block(question, place, resource);
        let sql = sql.trim_end().trim_end_matches(';');
        let sql = format!("SELECT count(*) FROM ({sql}) AS answer WHERE {condition}");
        self.db.session_as("oncall").one(&sql)
    }

    #[track_caller]
    fn count(&self, question: &str, place: usize, condition: &str) -> i64 {
        self.count_about(RESOURCE, question, place, condition)
    }

    /// The answer has one row that is as the condition says.
    #[track_caller]
    fn says(&self, question: &str, place: usize, condition: &str) {
        let found = self.count(question, place, condition);
        if found != 1 {
            let rows = self
                .db
                .session_as("oncall")
                .rows(&self.page.block(question, place, RESOURCE));
            panic!("{question}: {found} rows with {condition}: {rows:?}");
        }
    }

    /// What the page says to do.
    #[track_caller]
    fn does(&self, question: &str, place: usize) -> Option<String> {
        let sql = self.page.block(question, place, RESOURCE);
        self.db.session_as("oncall").text(&sql)
    }
}

#[track_caller]
fn acquire(s: &mut Session, holder: &str, ttl: &str) -> i64 {
    s.one(&format!(
        "SELECT acquire_lease('invoice:42', '{holder}', '{ttl}')"
    ))
}

const WRITE: &str = "UPDATE invoices SET amount = amount + 1";

/// Writes under a token, in a transaction of its own that is undone.
#[track_caller]
fn write(s: &mut Session, token: i64) -> Result<(), String> {
    s.exec(&format!("BEGIN; SET LOCAL leasehold.token = '{token}'"));
    let written = s.try_exec(WRITE);
    s.exec("ROLLBACK");
    written.map_err(|error| error.sqlstate)
}

/// Typed into one psql from its beginning to its end.
fn page_runs_in_psql() {
    let desk = Desk::with(&[]);
    acquire(&mut desk.client(), "biller-1", "5min");
    let blocks: Vec<&str> = desk.page.0.iter().map(|(_, sql)| sql.as_str()).collect();
    let script = desk.db.cluster.dir().join("on-call.sql");
    fs::write(&script, blocks.join("\n")).expect("the script can be written");
    let psql = environment().bindir.join("psql");
    let mut psql = environment().command(psql, desk.db.cluster.dir());
    psql.args(["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-U", "postgres"]);
    psql.args(["-p", "5432", "-d", &desk.db.name, "-h"])
        .arg(desk.db.cluster.socket_dir());
    let said = run(psql.arg("-f").arg(&script));
    assert!(said.contains("held|biller-1|billing|"), "{said}");
}

fn page_links_lead_somewhere() {
    let text = file("docs/on-call.md");
    let headings: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .map(|title| {
            let kept = title.to_lowercase().replace(' ', "-");
            kept.chars()
                .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
                .collect()
        })
        .collect();
    let mut links = 0;
    for rest in text.split("](#").skip(1) {
        let link = rest.split(')').next().unwrap_or_default();
        assert!(headings.contains(link), "no heading for #{link}");
        links += 1;
    }
    assert!(links > 0);
}

fn holder_his_session_and_waiters_are_found() {
    let desk = Desk::with(&[]);
    let mut holder = desk.client();
    desk.says(WHO, 0, "state = 'free' AND holder IS NULL");
    let token: i64 = holder.one(
        "SELECT acquire_lease('invoice:42', 'biller-1', '5min', metadata => '{\"batch\": 7}')",
    );
    let (first, second) = (desk.waiter(), desk.waiter());
    assert_eq!(
        desk.client()
            .one::<Option<i64>>("SELECT acquire_lease('invoice:42')"),
        None
    );
    desk.says(
        WHO,
        0,
        &format!(
            "state = 'held' AND holder = 'biller-1' AND role = 'billing'::regrole AND token = {token} AND waiters = 2
             AND durable AND metadata = '{{\"batch\": 7}}' AND granted_at < now() AND renewed_at IS NULL
             AND until BETWEEN now() AND now() + interval '5 minutes'"
        ),
    );
    let session = format!("pid = {} AND silent_for < ttl", holder.pid);
    desk.says(
        SESSION,
        0,
        &format!(
            "{session} AND application_name = 'biller' AND usename = 'billing' AND state = 'idle'"
        ),
    );
    assert_eq!(desk.count(WAITERS, 0, "true"), 2);
    // a waiter is awake now and then, to look
    wait_for("both to be asleep", || {
        (desk.count(WAITERS, 0, "wait_event = 'leasehold wait'") == 2).then_some(())
    });
    for (position, pid) in [(1, first.pid), (2, second.pid)] {
        desk.says(
            WAITERS,
            0,
            &format!(
                "position = {position} AND pid = {pid} AND holder = 'next' AND role = 'billing'::regrole
                 AND application_name = 'biller' AND waited < interval '1 minute' AND remaining > '0'"
            ),
        );
    }
    desk.says(
        WHY,
        0,
        "state = 'held' AND holder = 'biller-1' AND waiters = 2 AND max_waiters = '64'
         AND last_denied IS NOT NULL AND last_shed IS NULL",
    );
    desk.says(
        LEASED,
        0,
        "role = 'billing'::regrole AND state = 'held' AND leases = 1 AND never_renewed = 1 AND waiters = 2",
    );
    desk.says(
        LEASED,
        1,
        "resource = 'invoice:42' AND holder = 'biller-1' AND waiters = 2",
    );
    desk.says(
        OVERLOAD,
        0,
        "resource = 'invoice:42' AND waiters = 2 AND grants = 1 AND denials = 1 AND sheds = 0",
    );
    desk.says(
        OVERLOAD,
        1,
        "counted_for > '0' AND grants = 1 AND denials = 1",
    );
    // a wait that can't be served is seen as a shed
    assert!(desk.count(WHY, 0, "last_shed IS NOT NULL") == 0);
    desk.db.cluster.configure("leasehold.max_waiters = 2\n");
    desk.db.session().exec("SELECT pg_reload_conf()");
    wait_for("a call to be shed", || {
        let asked = desk
            .client()
            .try_exec("SELECT acquire_lease('invoice:42', wait => '1ms')");
        asked.is_err_and(|e| e.sqlstate == "LH005").then_some(())
    });
    wait_for("the setting", || {
        let shed = "waiters = 2 AND max_waiters = '2' AND last_shed IS NOT NULL";
        (desk.count(WHY, 0, shed) == 1).then_some(())
    });
    desk.says(OVERLOAD, 0, "sheds = 1");
    // the first is taken out of the queue, and the holder's session leaves
    let mut admin = desk.db.session_as("oncall");
    admin.cancel(first.pid);
    first.failed().1.is("57014");
    desk.says(
        WAITERS,
        0,
        &format!("position = 1 AND pid = {}", second.pid),
    );
    let pid = holder.pid;
    drop(holder);
    desk.db.cluster.wait_until_left(pid);
    desk.says(
        SESSION,
        0,
        &format!("pid = {pid} AND backend_start IS NULL AND query IS NULL"),
    );
    desk.says(WHO, 0, "state = 'held'");
}

fn what_holds_a_draining_resource_up_is_found() {
    let desk = Desk::with(&[]);
    let mut open = desk.client();
    let token = acquire(&mut open, "biller-1", "100ms");
    let fence = format!("BEGIN; SELECT fence('invoice:42', {token})");
    open.exec(&fence);
    desk.client()
        .exec(&format!("{fence}; PREPARE TRANSACTION 'payment-7'"));
    let mut taker = desk.client();
    wait_for("the lease to be over", || {
        let token: Option<i64> = taker.one("SELECT acquire_lease('invoice:42')");
        assert_eq!(token, None, "granted while others are inside");
        (desk.count(WHO, 0, "state = 'draining'") == 1).then_some(())
    });
    for question in [WHO, WHY] {
        desk.says(question, 0, "state = 'draining' AND writers = 2");
    }
    assert_eq!(desk.count(DRAINING, 0, "true"), 2);
    let prepared =
        "prepared = 'payment-7' AND pid IS NULL AND role = 'billing' AND open_since < now()";
    desk.says(DRAINING, 0, prepared);
    desk.says(
        DRAINING,
        0,
        &format!(
            "pid = {} AND prepared IS NULL AND role = 'billing' AND application_name = 'biller'
             AND state = 'idle in transaction' AND open_since < now() AND query LIKE '%fence%'",
            open.pid
        ),
    );
    // the prepared one is found after a restart too
    drop((open, taker));
    desk.db.cluster.restart(Stop::Fast);
    assert_eq!(desk.count(DRAINING, 0, "true"), 1);
    desk.says(DRAINING, 0, prepared);
    desk.client().exec("ROLLBACK PREPARED 'payment-7'");
    assert_eq!(desk.count(DRAINING, 0, "true"), 0);
}

fn refused_writes_are_explained() {
    let desk = Desk::with(&[]);
    let (mut late, mut next) = (desk.client(), desk.client());
    let old = acquire(&mut late, "biller-1", "1ms");
    next.exec("SELECT pg_sleep(0.01)");
    let new = acquire(&mut next, "biller-2", "5min");
    assert_eq!(write(&mut late, old), Err("LH001".to_owned()));
    late.err(WRITE).is("LH003");
    assert!(next.renew(RESOURCE, new));
    assert_eq!(write(&mut next, new), Ok(()));
    assert!(next.release(RESOURCE, new));
    assert_eq!(write(&mut next, new), Err("LH004".to_owned()));
    let by = |s: &Session, sqlstate| {
        format!(
            "sqlstate = '{sqlstate}' AND relation = 'invoices'::regclass AND role = 'billing'::regrole
             AND application_name = 'biller' AND pid = {}",
            s.pid
        )
    };
    assert_eq!(desk.count(REFUSED, 0, "true"), 3);
    let stale = format!(
        "presented = {old} AND current_token = {new} AND current_holder = 'biller-2' AND {}",
        by(&late, "LH001")
    );
    desk.says(REFUSED, 0, &stale);
    let none = format!("presented IS NULL AND {}", by(&late, "LH003"));
    desk.says(REFUSED, 0, &none);
    let over = format!(
        "presented = {new} AND current_token = {new} AND {}",
        by(&next, "LH004")
    );
    desk.says(REFUSED, 0, &over);
    // the story, in order
    let story = desk.page.block(STORY, 0, RESOURCE);
    let rows = desk.db.session_as("oncall").rows(&story);
    let events: Vec<&str> = rows
        .iter()
        .map(|row| row[1].as_deref().expect("an event"))
        .collect();
    let expected = [
        "granted",
        "expired",
        "granted",
        "write_refused",
        "write_refused",
        "renewed",
        "released",
        "write_refused",
    ];
    assert_eq!(events, expected);
    desk.says(
        TOKENS,
        0,
        &format!(
            "token = {old} AND holder = 'biller-1' AND over_by = 'expired' AND refused_writes = 1 AND renewals = 0
             AND granted_at <= over_at AND pid = {} AND application_name = 'biller'",
            late.pid
        ),
    );
    desk.says(
        TOKENS,
        0,
        &format!(
            "token = {new} AND holder = 'biller-2' AND over_by = 'released' AND refused_writes = 1 AND renewals = 1"
        ),
    );
    assert_eq!(desk.count(TOKENS, 0, "true"), 2);
    desk.says(
        TOKENS,
        1,
        "fenced_table = 'invoices'::regclass AND tgenabled = 'O' AND fence LIKE '%FOR EACH ROW%invoice:{id}%'",
    );
    desk.says(
        RECENT,
        0,
        "event = 'write_refused' AND sqlstate = 'LH001' AND events = 1 AND resources = 1 AND most_often = 'invoice:42'",
    );
    desk.says(
        RECENT,
        0,
        "event = 'granted' AND events = 2 AND first < last",
    );
    desk.says(
        RECENT,
        1,
        "events = 8 AND recorded_since < now() AND event_ring = '4096'",
    );
}

fn ended_session_is_found() {
    let desk = Desk::with(&[("leasehold.zombie_grace", "0")]);
    let mut zombie = desk.client();
    let token = acquire(&mut zombie, "biller-1", "10ms");
    zombie.exec(&format!("BEGIN; SELECT fence('invoice:42', {token})"));
    desk.db.cluster.wait_until_idle(zombie.pid);
    let granted: Option<i64> = desk
        .client()
        .one("SELECT acquire_lease('invoice:42', 'biller-2', wait => '1min')");
    assert!(granted.is_some());
    desk.says(
        ENDED,
        0,
        &format!(
            "pid = {} AND sqlstate = '57P01' AND resource = 'invoice:42' AND token = {token} AND holder = 'biller-1'
             AND role = 'billing'::regrole",
            zombie.pid
        ),
    );
    desk.says(OVERLOAD, 1, "drains = 1 AND sessions_ended = 1");
    desk.says(RECENT, 0, "event = 'session_ended' AND events = 1");
}

fn rights_and_quotas_are_explained() {
    let desk = Desk::with(&[]);
    let mut s = desk.client();
    assert_eq!(desk.count(ALLOWED, 0, "true"), 0);
    let mut admin = desk.db.session();
    admin.exec("CREATE ROLE clerks; SELECT allow_lease('invoice:*', 'clerks'), allow_lease('*', 'billing')");
    s.err("SELECT acquire_lease('invoice:42')").is("42501");
    assert_eq!(desk.count(ALLOWED, 0, "true"), 1);
    let refused = "resource = 'invoice:*' AND role = 'clerks'::regrole AND NOT lets_in AND granted_by = 'postgres'::regrole";
    desk.says(ALLOWED, 0, refused);
    // what lets it in: membership, or a rule of its own
    admin.exec("GRANT clerks TO billing");
    desk.says(ALLOWED, 0, "role = 'clerks'::regrole AND lets_in");
    let token = acquire(&mut s, "biller-1", "5min");
    assert!(s.release(RESOURCE, token));
    admin.exec("REVOKE clerks FROM billing; SELECT allow_lease('invoice:*', 'billing')");
    assert_eq!(desk.count(ALLOWED, 0, "true"), 2);
    desk.says(ALLOWED, 0, "role = 'billing'::regrole AND lets_in");
    let token = acquire(&mut s, "biller-1", "5min");
    assert!(s.release(RESOURCE, token));
    // a name before all prefixes
    admin.exec("SELECT allow_lease('invoice:42', 'clerks')");
    assert_eq!(desk.count(ALLOWED, 0, "true"), 1);
    desk.says(ALLOWED, 0, "resource = 'invoice:42' AND NOT lets_in");
    s.err("SELECT acquire_lease('invoice:42')").is("42501");
    // a name that ends in a star is no prefix
    admin.exec(r"SELECT allow_lease('all\*', 'clerks')");
    for (resource, rule) in [("all*", r"all\*"), ("all of them", "*"), (r"all\*", "*")] {
        let found = desk.count_about(resource, ALLOWED, 0, &format!("resource = '{rule}'"));
        assert_eq!(found, 1, "{resource}");
        let sql = format!("SELECT acquire_lease('{resource}', ttl => '1ms')");
        let is_refused = s.try_exec(&sql).is_err_and(|e| e.sqlstate == "42501");
        assert_eq!(is_refused, rule != "*", "{resource}");
    }
    // the quota
    admin.exec(
        "SELECT disallow_lease('invoice:42', 'clerks');
         ALTER ROLE billing SET leasehold.max_leases_per_role = 1",
    );
    let mut s = desk.client();
    acquire(&mut s, "biller-1", "5min");
    s.err("SELECT acquire_lease('invoice:43')").is("53400");
    admin.acquire("other");
    desk.says(
        QUOTA,
        0,
        "role = 'billing'::regrole AND live = 1 AND quota = '1'",
    );
    desk.says(
        QUOTA,
        0,
        "role = 'postgres'::regrole AND live = 1 AND quota = '0'",
    );
}

fn leases_of_before_a_restart_are_told_apart() {
    let desk = Desk::with(&[]);
    let mut s = desk.client();
    let token = acquire(&mut s, "biller-1", "5min");
    let gone: i64 = s.one("SELECT acquire_lease('invoice:43', 'biller-2', '1ms')");
    drop(s);
    desk.db.cluster.restart(Stop::Fast);
    let lease = format!("holder = 'biller-1' AND token = {token} AND until > now()");
    desk.says(WHO, 0, &format!("{lease} AND state = 'recovering'"));
    desk.says(SESSION, 0, "pid IS NULL AND backend_start IS NULL");
    desk.says(
        FAILOVER,
        0,
        "NOT standby AND state = 'free' AND grace IS NULL",
    );
    assert_eq!(desk.count(FAILOVER, 1, "true"), 1);
    desk.says(FAILOVER, 1, &format!("resource = 'invoice:42' AND {lease}"));
    // the one that had run out is not believed in
    assert_eq!(desk.count(FAILOVER, 2, "true"), 1);
    desk.says(
        FAILOVER,
        2,
        &format!("resource = 'invoice:43' AND token = {gone} AND holder = 'biller-2' AND role = 'billing'::regrole"),
    );
    // heard of, and with leases in memory nothing is granted at first
    let mut s = desk.client();
    assert!(s.renew(RESOURCE, token));
    assert_eq!(desk.count(FAILOVER, 1, "true"), 0);
    desk.says(WHO, 0, &format!("{lease} AND state = 'held'"));
    s.exec("SET leasehold.durability = 'memory'; SELECT acquire_lease('in memory', ttl => '5min')");
    drop(s);
    desk.db.cluster.restart(Stop::Immediate);
    desk.says(
        FAILOVER,
        0,
        "state = 'recovering' AND grace BETWEEN '1 minute' AND '5 minutes' AND grants_from > now()",
    );
    desk.says(FAILOVER, 1, &format!("resource = 'invoice:42' AND {lease}"));
}

fn failover_is_explained() {
    let pair = Pair::new(&[]);
    let desk = Desk::on(Db {
        cluster: pair.db.cluster.clone(),
        name: pair.db.name.clone(),
    });
    let token = acquire(&mut desk.client(), "biller-1", "5min");
    pair.db.session().exec(MONITOR);
    pair.catch_up();
    desk.says(STANDBY, 1, "state = 'streaming' AND bytes_behind >= 0");
    let at = |db: Db| Desk {
        db,
        page: Page::read("docs/on-call.md"),
    };
    let standby = at(pair.copy());
    for (desk, is_standby) in [(&desk, false), (&standby, true)] {
        desk.says(FAILOVER, 0, &format!("standby = {is_standby}"));
        assert_eq!(desk.count(STANDBY, 0, "true"), 7);
        desk.says(
            STANDBY,
            0,
            &format!(
                "standby = {is_standby} AND name = 'leasehold.promotion' AND setting = 'lossy'"
            ),
        );
        let held = format!("state = 'held' AND token = {token}");
        let recovering = format!("state = 'recovering' AND token = {token}");
        let found = desk.count(WHO, 0, &held) + desk.count(WHO, 0, &recovering);
        assert_eq!(found, 1);
    }
    run_all_queries(&standby.db);
    let Promoted { db, .. } = pair.fail_over();
    let desk = at(db);
    desk.says(
        FAILOVER,
        0,
        "NOT standby AND promotion = 'lossy' AND state = 'recovering' AND grants_from > now()
         AND grace BETWEEN interval '1 minute' AND interval '5 minutes'",
    );
    assert_eq!(desk.count(FAILOVER, 1, "true"), 0);
    desk.says(
        FAILOVER,
        2,
        &format!("resource = 'invoice:42' AND token = {token} AND holder = 'biller-1' AND role = 'billing'::regrole"),
    );
    desk.says(WHO, 0, "state = 'recovering' AND until > now()");
    let values = run_all_queries(&desk.db);
    let grace = &values["leasehold_grace_seconds"][""];
    assert!(grace.is_some_and(|s| s > 60.0), "{grace:?}");
}

fn lease_is_broken_and_a_client_kept_out() {
    let desk = Desk::with(&[]);
    let mut holder = desk.client();
    assert_eq!(desk.does(FREE, 0), None, "there is nothing to end");
    let token = acquire(&mut holder, "biller-1", "5min");
    let waiter = desk.waiter();
    assert_eq!(desk.does(FREE, 0), Some(token.to_string()));
    let (_, next) = waiter.granted();
    assert!(next > token);
    assert!(!holder.renew(RESOURCE, token));
    assert_eq!(write(&mut holder, token), Err("LH001".to_owned()));
    desk.says(
        TOKENS,
        0,
        &format!("token = {token} AND over_by = 'broken' AND over_at IS NOT NULL"),
    );
    // as maintenance would
    let waiter = desk.waiter();
    desk.does(KEEP_OUT, 0);
    waiter.failed().1.is("42501");
    desk.says(WHO, 0, "state = 'free'");
    assert!(!holder.check_fence(RESOURCE, next));
    holder.err("SELECT acquire_lease('invoice:42')").is("42501");
    assert_eq!(desk.count(ALLOWED, 0, "NOT lets_in"), 1);
    let mut oncall = desk.db.session_as("oncall");
    let token = acquire(&mut oncall, "maintenance", "5min");
    assert!(oncall.release(RESOURCE, token));
    desk.does(KEEP_OUT, 1);
    assert_eq!(desk.count(ALLOWED, 0, "true"), 0);
    acquire(&mut holder, "biller-1", "5min");
}

fn ledger_is_measured() {
    let desk = Desk::with(&[]);
    let mut s = desk.client();
    for i in 0..3 {
        s.acquire(&format!("invoice:{i}"));
    }
    desk.says(
        LEDGER,
        0,
        "ledger_rows = 3 AND old_rows = 0 AND oldest_grant < now() AND size IS NOT NULL AND retention = '7d'",
    );
    let mut admin = desk.db.session();
    admin.exec("UPDATE leasehold.ledger SET granted_at = now() - interval '8 days' WHERE resource = 'invoice:0'");
    desk.says(LEDGER, 0, "ledger_rows = 3 AND old_rows = 1");
    // what a session has counted is told when it leaves, at the latest
    drop((s, admin));
    wait_for("the statistics", || {
        (desk.count(LEDGER, 1, "n_live_tup = 3") == 1).then_some(())
    });
}

/// The role that monitoring/README.md makes.
const MONITOR: &str = "CREATE ROLE leasehold_monitor LOGIN; GRANT pg_monitor TO leasehold_monitor";

/// A query of monitoring/queries.yaml.
struct Query {
    namespace: String,
    sql: String,
    /// Name and usage, in order.
    columns: Vec<(String, String)>,
}

impl Query {
    fn all() -> Vec<Self> {
        let documents = YamlLoader::load_from_str(&file("monitoring/queries.yaml"));
        let documents = documents.unwrap_or_else(|e| panic!("monitoring/queries.yaml: {e}"));
        let [Yaml::Hash(queries)] = &documents[..] else {
            panic!("monitoring/queries.yaml is not one mapping");
        };
        let queries = queries.iter();
        queries
            .map(|(name, query)| Self::of(text(name), query))
            .collect()
    }

    fn of(namespace: &str, query: &Yaml) -> Self {
        let known = |keys: &Yaml, allowed: &[&str]| {
            for key in keys.as_hash().expect("a mapping").keys() {
                assert!(
                    allowed.contains(&text(key)),
                    "{namespace}: unknown key {key:?}"
                );
            }
        };
        known(query, &["query", "metrics"]);
        let columns = query["metrics"].as_vec().expect("a list of metrics");
        let columns = columns.iter().map(|column| {
            let column = column.as_hash().expect("a column");
            assert_eq!(column.len(), 1, "{namespace}: {column:?}");
            let (name, about) = column.front().expect("a column");
            known(about, &["usage", "description"]);
            assert!(!text(&about["description"]).is_empty());
            (text(name).to_owned(), text(&about["usage"]).to_owned())
        });
        Self {
            namespace: namespace.to_owned(),
            sql: text(&query["query"]).to_owned(),
            columns: columns.collect(),
        }
    }

    fn labels(&self) -> Vec<&str> {
        let labels = self.columns.iter().filter(|(_, usage)| usage == "LABEL");
        labels.map(|(name, _)| name.as_str()).collect()
    }

    /// Its metrics, and their columns.
    fn metrics(&self) -> Vec<(String, &str)> {
        let values = self.columns.iter().filter(|(_, usage)| usage != "LABEL");
        values
            .map(|(name, _)| (format!("{}_{name}", self.namespace), name.as_str()))
            .collect()
    }
}

#[track_caller]
fn text(yaml: &Yaml) -> &str {
    yaml.as_str()
        .unwrap_or_else(|| panic!("not a text: {yaml:?}"))
}

/// The labels of each metric.
fn all_metrics() -> BTreeMap<String, Vec<String>> {
    let mut metrics = BTreeMap::new();
    for query in Query::all() {
        let labels: Vec<String> = query.labels().iter().map(|l| (*l).to_owned()).collect();
        for (name, _) in query.metrics() {
            let before = metrics.insert(name.clone(), labels.clone());
            assert!(before.is_none(), "{name} comes twice");
        }
    }
    metrics
}

/// Values by metric, and by the values of the labels but the database.
type Values = BTreeMap<String, BTreeMap<String, Option<f64>>>;

/// Runs all queries as the exporter would; their columns must be as the file says.
fn run_all_queries(db: &Db) -> Values {
    let mut values = Values::new();
    let is_standby = db.session().one::<bool>("SELECT pg_is_in_recovery()");
    for query in Query::all() {
        let mut s = db.session_as("leasehold_monitor");
        if !is_standby {
            has_columns(&mut s, &query);
        }
        for (metric, column) in query.metrics() {
            let labels = query.labels().join(", ");
            let others = labels.replace("datname", "''");
            let rows = s.rows(&format!(
                "SELECT datname, concat_ws(' ', VARIADIC array_remove(ARRAY[{others}]::text[], '')), {column}::float8
                   FROM ({}) AS query",
                query.sql
            ));
            let series = values.entry(metric.clone()).or_default();
            for row in rows {
                assert_eq!(row[0].as_ref(), Some(&db.name), "{metric}");
                let label = row[1].clone().unwrap_or_default();
                let value = row[2].as_ref().map(|v| v.parse().expect("a number"));
                let before = series.insert(label, value);
                assert!(before.is_none(), "{metric} has two values for {row:?}");
            }
        }
    }
    values
}

/// Exactly these, in this order, of types that the exporter makes labels and numbers of.
fn has_columns(s: &mut Session, query: &Query) {
    s.exec(&format!("CREATE TEMP TABLE answer AS {}", query.sql));
    let columns = s.rows(
        "SELECT attname, atttypid::regtype FROM pg_attribute
          WHERE attrelid = 'answer'::regclass AND attnum > 0 ORDER BY attnum",
    );
    let names: Vec<&str> = columns.iter().filter_map(|c| c[0].as_deref()).collect();
    let expected: Vec<&str> = query
        .columns
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(names, expected, "{}", query.namespace);
    for (row, (name, usage)) in columns.iter().zip(&query.columns) {
        let kind = row[1].as_deref().unwrap_or_default();
        let fits = match usage.as_str() {
            "LABEL" => matches!(kind, "text" | "name"),
            "COUNTER" => kind == "bigint" && name.ends_with("total"),
            "GAUGE" => {
                matches!(kind, "bigint" | "integer" | "double precision")
                    && !name.ends_with("total")
            }
            _ => false,
        };
        assert!(fits, "{}: {name} is {kind}, {usage}", query.namespace);
    }
}

fn metrics_are_those_of_the_queries() {
    let db = Db::with(&[]);
    let page = Page::read("monitoring/README.md");
    let [(_, sql)] = &page.0[..] else {
        panic!("monitoring/README.md has another block of SQL");
    };
    let squeezed = sql.replace(";\n", "; ");
    assert_eq!(squeezed.trim_end_matches(';'), MONITOR);
    db.session().exec(sql);
    let values = run_all_queries(&db);
    let metrics = all_metrics();
    assert_eq!(
        values.keys().collect::<Vec<_>>(),
        metrics.keys().collect::<Vec<_>>()
    );
    for (metric, labels) in metrics {
        assert!(labels.contains(&"datname".to_owned()), "{metric}");
        let is_plain = |c: char| c.is_ascii_lowercase() || c == '_';
        assert!(metric.chars().all(is_plain), "{metric}");
        // nothing has happened, and all of it is told all the same
        let is_listed = !metric.starts_with("leasehold_contended_");
        assert_eq!(!values[&metric].is_empty(), is_listed, "{metric}");
    }
}

fn metrics_tell_what_is() {
    let desk = Desk::with(&[]);
    desk.db.session().exec(MONITOR);
    let (mut holder, mut open) = (desk.client(), desk.client());
    let old = acquire(&mut holder, "biller-1", "1ms");
    holder.exec("SELECT pg_sleep(0.01)");
    let token = acquire(&mut holder, "biller-1", "5min");
    assert_eq!(write(&mut holder, old), Err("LH001".to_owned()));
    let (first, _second) = (desk.waiter(), desk.waiter());
    desk.client().exec("SELECT acquire_lease('invoice:42')");
    open.exec(&format!("BEGIN; SELECT fence('invoice:42', {token})"));
    let values = run_all_queries(&desk.db);
    let one = |metric: &str, labels: &str| -> f64 {
        let series = &values[metric];
        let value = series
            .get(labels)
            .unwrap_or_else(|| panic!("{metric} has no {labels}: {series:?}"));
        value.unwrap_or_else(|| panic!("{metric} is NULL"))
    };
    for (metric, labels, expected) in [
        ("leasehold_grants_total", "", 2.0),
        ("leasehold_takeovers_total", "", 1.0),
        ("leasehold_expiries_total", "", 1.0),
        ("leasehold_denials_total", "", 1.0),
        ("leasehold_refusals_total", "LH001", 1.0),
        ("leasehold_refusals_total", "LH006", 0.0),
        ("leasehold_leases_now", "held", 1.0),
        ("leasehold_leases_now", "draining", 0.0),
        ("leasehold_leases_oldest_seconds", "draining", 0.0),
        ("leasehold_waiters_now", "", 2.0),
        ("leasehold_writers_now", "", 1.0),
        ("leasehold_grace_seconds", "", 0.0),
        ("leasehold_contended_waiters", RESOURCE, 2.0),
        ("leasehold_contended_denials_total", RESOURCE, 1.0),
    ] {
        assert_eq!(one(metric, labels), expected, "{metric} {labels}");
    }
    for (metric, labels) in [
        ("leasehold_leases_oldest_seconds", "held"),
        ("leasehold_waiters_longest_seconds", ""),
        ("leasehold_writers_oldest_seconds", ""),
        ("leasehold_counted_since_seconds", ""),
        ("leasehold_hold_seconds", "99"),
        ("leasehold_ledger_bytes", ""),
    ] {
        assert!(one(metric, labels) > 0.0, "{metric} {labels}");
    }
    assert_eq!(values["leasehold_wait_seconds"]["50"], None);
    open.exec("COMMIT");
    assert!(holder.release(RESOURCE, token));
    first.granted();
    let values = run_all_queries(&desk.db);
    assert!(values["leasehold_wait_seconds"]["50"].is_some_and(|s| s > 0.0));
    assert_eq!(values["leasehold_waits_total"][""], Some(1.0));
    // of many contended resources so many are told
    let mut s = desk.db.session();
    s.exec(
        "SELECT acquire_lease('r' || i), acquire_lease('r' || i) FROM generate_series(1, 30) AS i",
    );
    let values = run_all_queries(&desk.db);
    assert_eq!(values["leasehold_contended_waiters"].len(), 20);
    s.exec("SELECT leasehold.reset_stats()");
    let values = run_all_queries(&desk.db);
    assert_eq!(values["leasehold_grants_total"][""], Some(0.0));
}

fn dashboard() -> serde_json::Value {
    let text = file("monitoring/grafana-dashboard.json");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("grafana-dashboard.json: {e}"))
}

fn panels(dashboard: &serde_json::Value) -> Vec<&serde_json::Value> {
    let panels = dashboard["panels"].as_array().expect("panels");
    panels
        .iter()
        .filter(|panel| panel["type"] != "row")
        .collect()
}

/// The queries of all panels, with their legends.
fn expressions(dashboard: &serde_json::Value) -> Vec<(String, String)> {
    let targets = panels(dashboard).into_iter().flat_map(|panel| {
        let targets = panel["targets"].as_array().expect("targets");
        assert!(!targets.is_empty(), "{panel}");
        targets.iter()
    });
    let text = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
    targets
        .map(|target| (text(&target["expr"]), text(&target["legendFormat"])))
        .collect()
}

/// The words of a text: names of metrics, labels, functions.
fn words(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !is_part(c)).collect()
}

fn metrics_in(text: &str) -> BTreeSet<&str> {
    let words = words(text).into_iter();
    words
        .filter(|word| word.starts_with("leasehold_") && *word != "leasehold_monitor")
        .collect()
}

/// What stands between two marks, wherever it does.
fn between<'a>(text: &'a str, open: &str, close: &str) -> Vec<&'a str> {
    let parts = text.split(open).skip(1);
    parts
        .map(|part| part.split(close).next().unwrap_or_default())
        .collect()
}

/// Prometheus adds it.
const LABEL_OF_THE_SCRAPE: &str = "instance";

fn dashboard_uses_the_metrics() {
    let (dashboard, metrics) = (dashboard(), all_metrics());
    let mut unused: BTreeSet<String> = metrics.keys().cloned().collect();
    for (expr, legend) in expressions(&dashboard) {
        let used = metrics_in(&expr);
        let [metric] = used.iter().collect::<Vec<_>>()[..] else {
            panic!("not one metric: {expr}");
        };
        let labels = metrics
            .get(*metric)
            .unwrap_or_else(|| panic!("there is no {metric}: {expr}"));
        unused.remove(*metric);
        // labels are those of the metric, and a legend shows what the result still has
        let kept = between(&expr, "by (", ")").concat();
        let matched = between(&expr, "{", "}").concat();
        let matched = between(&format!(", {matched}"), ", ", "=").concat();
        let known = |label: &&str| {
            label.is_empty() || labels.iter().any(|l| l == label) || *label == LABEL_OF_THE_SCRAPE
        };
        assert!(words(&kept).iter().all(known), "{expr}");
        assert!(!matched.is_empty(), "{expr}");
        let is_whole = kept.is_empty() && expr.starts_with("topk(");
        for shown in between(&legend, "{{", "}}") {
            assert!(
                words(&kept).contains(shown) || (is_whole && known(&shown)),
                "{legend}: {expr}"
            );
        }
        let is_rate = expr.contains("rate(");
        assert_eq!(is_rate, metric.ends_with("_total"), "{expr}");
        for (open, close) in [('(', ')'), ('{', '}'), ('[', ']')] {
            assert_eq!(
                expr.matches(open).count(),
                expr.matches(close).count(),
                "{expr}"
            );
        }
    }
    assert_eq!(
        unused,
        BTreeSet::new(),
        "metrics that the dashboard does not show"
    );
    // what the README names
    for metric in metrics_in(&file("monitoring/README.md")) {
        let is_known = metrics.keys().any(|known| known == metric)
            || (metric.ends_with('_') && metrics.keys().any(|known| known.starts_with(metric)));
        assert!(is_known, "monitoring/README.md: {metric}");
    }
}

fn dashboard_can_be_imported() {
    let dashboard = dashboard();
    assert_eq!(dashboard["title"], "leasehold");
    assert!(dashboard["schemaVersion"].is_u64());
    assert!(dashboard["id"].is_null(), "the id of somebody's Grafana");
    let variables: Vec<&str> = dashboard["templating"]["list"]
        .as_array()
        .expect("variables")
        .iter()
        .map(|variable| variable["name"].as_str().expect("a name"))
        .collect();
    assert_eq!(variables, ["datasource", "instance", "datname"]);
    for variable in dashboard["templating"]["list"]
        .as_array()
        .into_iter()
        .flatten()
    {
        if let Some(query) = variable["query"]["query"].as_str() {
            let metrics = all_metrics();
            let used = metrics_in(query);
            assert!(
                !used.is_empty() && used.iter().all(|m| metrics.contains_key(*m)),
                "{query}"
            );
        }
    }
    let all = dashboard["panels"].as_array().expect("panels");
    let ids: BTreeSet<u64> = all
        .iter()
        .filter_map(|panel| panel["id"].as_u64())
        .collect();
    assert_eq!(ids.len(), all.len(), "two panels have one id");
    let (mut titles, mut places) = (BTreeSet::new(), BTreeSet::new());
    for panel in all {
        let at = |side: &str| panel["gridPos"][side].as_u64().expect("a place");
        assert!(at("x") + at("w") <= 24, "{panel}");
        for x in at("x")..at("x") + at("w") {
            for y in at("y")..at("y") + at("h") {
                assert!(places.insert((x, y)), "on another panel: {panel}");
            }
        }
        assert!(titles.insert(panel["title"].as_str().expect("a title")));
    }
    for panel in panels(&dashboard) {
        assert!(
            panel["description"].is_string()
                && panel["fieldConfig"]["defaults"]["unit"].is_string()
        );
        let targets = panel["targets"].as_array().into_iter().flatten();
        for source in targets.chain([panel]) {
            assert_eq!(source["datasource"]["uid"], "${datasource}", "{panel}");
        }
    }
    for (expr, _) in expressions(&dashboard) {
        let names: BTreeSet<&str> = between(&expr, "$", "\"")
            .into_iter()
            .filter(|name| !name.starts_with("__rate_interval"))
            .collect();
        assert_eq!(names, BTreeSet::from(["datname", "instance"]), "{expr}");
    }
}
