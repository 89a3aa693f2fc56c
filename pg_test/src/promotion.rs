//! Layer copies, part promotion: a standby takes over. Where it may lack the last grants (`lossy`), nothing that the
//! ledger says of leases is trusted; where it has them all (`lossless`), leases live on.
//!
//! That something is not granted before a time is shown by the instant at which it is granted first; that it is not
//! granted at all by a time that is longer than any test.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::copying::{FAR_AHEAD, Pair, Promoted, epoch};
use crate::session::Session;

crate::tests![
    lossy_promotion_ends_every_earlier_lease,
    lossy_promotion_grants_nothing_for_max_ttl,
    lossy_promotion_grants_nothing_for_the_longest_ttl_of_the_ledger,
    lossy_promotion_counts_a_ttl_that_the_ledger_holds_no_more,
    lossy_time_begins_anew_with_a_restart,
    lossy_regime_outlives_restarts_before_the_first_grant,
    lossy_regime_is_that_of_each_database,
    earlier_tokens_stay_stale_once_grants_go_on,
    sessions_of_the_standby_live_through_its_promotion,
    tokens_lie_above_the_timelines_base,
    tokens_lie_above_those_that_the_standby_never_received,
    tokens_that_the_standby_never_received_are_stale,
    extension_made_again_on_a_promoted_server_stays_above,
    second_promotion_from_behind_gives_an_epoch_of_its_own,
    promotion_beside_two_others_gives_an_epoch_of_its_own,
    standbys_that_took_the_same_timeline_are_ordered_by_the_clock,
    superseded_token_is_stale_where_its_successor_was_lost,
    prepared_writer_is_waited_for_after_a_promotion,
    lossless_promotion_keeps_leases,
    lossless_promotion_counts_ttls_anew,
    lossless_promotion_knows_marked_releases,
    lossless_promotion_waits_for_memory_leases,
    lossless_promotion_gives_an_epoch_of_its_own,
    leases_of_a_lossless_promotion_outlive_restarts,
];

const LOSSLESS: &[(&str, &str)] = &[("leasehold.promotion", "lossless")];
/// Long enough to tell it from a time that was not waited for.
const MAX_TTL: &[(&str, &str)] = &[("leasehold.max_ttl", "2s")];
const MAX_TTL_IS: Duration = Duration::from_secs(2);
/// Where the time itself is of no interest.
const SHORT: &[(&str, &str)] = &[("leasehold.max_ttl", "500ms")];

/// Gives what was granted first, and asserts that it was not granted before `time` had passed since `since`.
#[track_caller]
fn first_grant(db: &Db, resource: &str, since: Instant, time: Duration) -> i64 {
    let token = db.session().await_for(resource, "500ms");
    let passed = since.elapsed();
    assert!(passed >= time, "granted after {passed:?}");
    token
}

/// Stays away from the server for so long.
fn let_pass(time: Duration) {
    std::thread::sleep(time);
}

fn lossy_promotion_ends_every_earlier_lease() {
    let pair = Pair::new(&[]);
    let mut s = pair.db.session();
    s.exec("CREATE TABLE doc (id int PRIMARY KEY, n int, tok bigint); INSERT INTO doc VALUES (1, 0, 0)");
    s.exec("SELECT fence_table('doc', 'doc:{id}', 'tok')");
    let (live, renewed, over) = (
        s.acquire("doc:1"),
        s.acquire("renewed"),
        s.acquire_expired("over"),
    );
    assert!(s.renew("renewed", renewed));
    let (stale, current) = s.stale_and_current("late");
    pair.catch_up();
    let Promoted { db, .. } = pair.fail_over();
    let leases = [
        ("doc:1", live),
        ("renewed", renewed),
        ("over", over),
        ("late", stale),
        ("late", current),
        ("never granted", live),
    ];
    for (resource, token) in leases {
        db.has_lost(resource, token);
    }
    let mut s = db.session();
    for write in ["UPDATE doc SET n = 1", "DELETE FROM doc"] {
        s.exec(&format!("BEGIN; SET LOCAL leasehold.token = '{live}'"));
        db.refused(&mut s, write, "LH001");
        db.refused(&mut s, write, "LH003");
    }
    let stamped = format!("UPDATE doc SET n = 1, tok = {live}");
    db.refused(&mut s, &stamped, "LH001");
    // their holders may still believe in them, for five minutes
    for resource in ["doc:1", "renewed", "over", "late", "never granted"] {
        assert_eq!(s.try_acquire(resource), None, "{resource} granted early");
    }
}

fn lossy_promotion_grants_nothing_for_max_ttl() {
    let pair = Pair::new(MAX_TTL);
    let token = pair.db.session().acquire_for("r", "500ms");
    pair.catch_up();
    // the time that it was a standby does not count, though it was asked
    assert!(pair.copy().session().check_fence("r", token));
    let_pass(MAX_TTL_IS);
    let Promoted { db, before } = pair.fail_over();
    let other = first_grant(&db, "other", before, MAX_TTL_IS);
    assert!(other > token && db.session().acquire_for("r", "2s") > other);
}

/// A server with the given `leasehold.max_ttl`, after a promotion from one that has granted for longer.
fn promoted_with_a_shorter_max_ttl(granted: impl FnOnce(&mut Session)) -> Promoted {
    let pair = Pair::new(&[("leasehold.max_ttl", "3s")]);
    granted(&mut pair.db.session());
    pair.catch_up();
    pair.standby.configure("leasehold.max_ttl = '500ms'\n");
    pair.standby.restart(Stop::Fast);
    pair.catch_up();
    pair.fail_over()
}

fn lossy_promotion_grants_nothing_for_the_longest_ttl_of_the_ledger() {
    let promoted = promoted_with_a_shorter_max_ttl(|s| {
        s.acquire_for("r", "3s");
        s.acquire_for("q", "100ms");
    });
    first_grant(&promoted.db, "q", promoted.before, Duration::from_secs(3));
}

fn lossy_promotion_counts_a_ttl_that_the_ledger_holds_no_more() {
    let promoted = promoted_with_a_shorter_max_ttl(|s| {
        let token = s.acquire_for("r", "3s");
        assert!(s.release("r", token));
        s.acquire_for("r", "100ms");
    });
    first_grant(&promoted.db, "q", promoted.before, Duration::from_secs(3));
}

fn lossy_time_begins_anew_with_a_restart() {
    let pair = Pair::new(MAX_TTL);
    let token = pair.db.session().acquire_for("r", "500ms");
    pair.catch_up();
    let Promoted { db, .. } = pair.fail_over();
    let mut restarted = Instant::now();
    for stop in [Stop::Fast, Stop::Immediate] {
        let_pass(MAX_TTL_IS / 2);
        db.cluster.stop(stop);
        restarted = Instant::now();
        db.cluster.start();
        db.has_lost("r", token);
    }
    first_grant(&db, "r", restarted, MAX_TTL_IS);
    // a crash of a backend is a restart as well
    let pair = Pair::new(MAX_TTL);
    pair.catch_up();
    let Promoted { db, .. } = pair.fail_over();
    let_pass(MAX_TTL_IS / 2);
    let victim = db.cluster.connect();
    let crashed = Instant::now();
    db.cluster.crash_backend(victim.pid);
    first_grant(&db, "r", crashed, MAX_TTL_IS);
}

/// A grant that is rolled back is no first grant: the ledger stays the old primary's, but a token is used up.
fn lossy_regime_outlives_restarts_before_the_first_grant() {
    let pair = Pair::new(SHORT);
    let mut s = pair.db.session();
    s.tokens_far_ahead();
    let token = s.acquire_for("r", "500ms");
    pair.catch_up();
    let Promoted { db, .. } = pair.fail_over();
    let (mut last, mut epochs) = (token, Vec::new());
    for stop in [Stop::Fast, Stop::Immediate, Stop::Fast] {
        let mut s = db.session();
        let undone = wait_for("the grant", || {
            s.exec("BEGIN");
            let token = s.try_acquire_for("q", "500ms");
            s.exec("ROLLBACK");
            token
        });
        assert!(undone > last, "{undone} after {last}");
        last = undone;
        epochs.push(epoch(undone));
        drop(s);
        db.cluster.restart(stop);
        db.has_lost("r", token);
    }
    let kept = db.session().await_for("r", "500ms");
    assert!(kept > last);
    epochs.push(epoch(kept));
    assert!(epochs[0] > epoch(token), "{epochs:?} after {token}");
    epochs.dedup();
    assert_eq!(epochs.len(), 1, "one promotion has used up {epochs:?}");
}

fn lossy_regime_is_that_of_each_database() {
    let pair = Pair::new(SHORT);
    let other = Db::on(&pair.db.cluster);
    let (in_db, in_other) = (
        pair.db.session().acquire_for("r", "500ms"),
        other.session().acquire_for("r", "500ms"),
    );
    pair.catch_up();
    let Promoted { db, .. } = pair.fail_over();
    let other = other.at(&db.cluster);
    let token = db.session().await_for("new", "500ms");
    // first asked when the time is over: its leases are lost all the same, and nothing waits again
    other.has_lost("r", in_other);
    assert!(other.session().acquire_for("r", "500ms") > in_other);
    let third = Db::on(&db.cluster);
    third.session().acquire_for("r", "500ms");
    db.has_lost("r", in_db);
    assert!(db.session().acquire_for("r", "500ms") > token);
}

fn earlier_tokens_stay_stale_once_grants_go_on() {
    let pair = Pair::new(SHORT);
    let mut s = pair.db.session();
    let (r, q) = (s.acquire_for("r", "500ms"), s.acquire_for("q", "500ms"));
    let lost = s.spend_tokens();
    pair.catch_up();
    let Promoted { db, .. } = pair.fail_over();
    db.session().await_for("new", "500ms");
    db.cluster
        .configure("leasehold.max_ttl = '5min'\nleasehold.promotion = 'lossless'\n");
    db.cluster.restart(Stop::Fast);
    let held = db.session().acquire("held");
    for stop in [Stop::Fast, Stop::Immediate] {
        db.has_lost("r", r);
        db.has_lost("q", q);
        db.has_lost("spent1", lost);
        // what this server has granted itself lives through its restarts
        let mut s = db.session();
        assert_eq!(s.try_acquire("held"), None);
        assert!(s.check_fence("held", held) && s.renew("held", held));
        drop(s);
        db.cluster.restart(stop);
    }
    assert!(db.session().acquire("r") > held);
    db.has_lost("r", r);
}

fn sessions_of_the_standby_live_through_its_promotion() {
    let pair = Pair::new(&[]);
    let token = pair.db.session().acquire("r");
    pair.catch_up();
    let mut s = pair.copy().session();
    assert!(s.check_fence("r", token));
    assert_eq!(s.info("r", "token"), Some(token.to_string()));
    let Promoted { db, .. } = pair.fail_over();
    assert!(!s.check_fence("r", token) && !s.renew("r", token));
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH001");
    assert_eq!(s.try_acquire("r"), None);
}

fn tokens_lie_above_the_timelines_base() {
    let check = |db: &Db, timeline: i64| {
        assert_eq!(db.cluster.timeline(), timeline);
        let token = db.session().await_for("r", "500ms");
        let epoch = epoch(token);
        assert!(epoch >= timeline - 1, "{token} on timeline {timeline}");
    };
    let first = Pair::new(SHORT).promoted();
    check(&first, 2);
    let second = Pair::of(first).promoted();
    check(&second, 3);
}

impl Pair {
    /// A server that runs, and a new standby of it.
    fn of(db: Db) -> Self {
        let standby = Cluster::builder().standby_of(&db.cluster);
        standby.start();
        Self {
            db,
            standby: Arc::new(standby),
        }
    }

    /// Its standby, caught up and promoted.
    fn promoted(self) -> Db {
        self.catch_up();
        self.fail_over().db
    }
}

/// A primary whose standby was cut off before the last of many grants, with the tokens of `r` that the standby has and
/// of the last lease of `r`, which it has not; and that standby, promoted.
fn lagging(settings: &[(&str, &str)], far_ahead: bool) -> (Promoted, i64, i64) {
    let pair = Pair::new(settings);
    let mut s = pair.db.session();
    if far_ahead {
        s.tokens_far_ahead();
    }
    let received = s.acquire_expired("r");
    assert_eq!(received > FAR_AHEAD, far_ahead);
    pair.catch_up();
    pair.standby.cut_off();
    s.spend_tokens();
    let last = s.acquire_for("r", "500ms");
    let position = "SELECT last_value FROM leasehold.token_seq";
    let known: i64 = pair.copy().session().one(position);
    assert!(last > known, "the standby has the block of {last}");
    drop(s);
    (pair.fail_over(), received, last)
}

fn tokens_lie_above_those_that_the_standby_never_received() {
    for far_ahead in [false, true] {
        let (promoted, _, last) = lagging(SHORT, far_ahead);
        let next = promoted.db.session().await_for("r", "500ms");
        assert!(next > last, "{next} after {last}");
        // not by luck: whatever the old primary goes on to grant stays below
        assert!(epoch(next) > epoch(last), "{next} after {last}");
    }
}

fn tokens_that_the_standby_never_received_are_stale() {
    let (promoted, received, last) = lagging(SHORT, false);
    let db = promoted.db;
    let tokens = [received, last, last + 1_000_000];
    for token in tokens {
        db.has_lost("r", token);
        db.has_lost("unknown", token);
    }
    db.session().await_for("other", "500ms");
    for token in tokens {
        db.has_lost("r", token);
        db.has_lost("unknown", token);
    }
    db.cluster.restart(Stop::Fast);
    for token in tokens {
        db.has_lost("r", token);
        db.has_lost("unknown", token);
    }
}

/// With the extension goes what it knew of the promotion; what the old primary may have granted does not.
fn extension_made_again_on_a_promoted_server_stays_above() {
    let (promoted, _, last) = lagging(SHORT, true);
    let mut s = promoted.db.session();
    s.exec("DROP EXTENSION leasehold; CREATE EXTENSION leasehold");
    let next = s.await_for("r", "500ms");
    assert!(next > last, "{next} after {last}");
}

/// The second server was promoted from a state that lacks the first one's grants, so it knows of no epoch but the
/// original's.
fn second_promotion_from_behind_gives_an_epoch_of_its_own() {
    for far_ahead in [false, true] {
        let pair = Pair::new(SHORT);
        let mut s = pair.db.session();
        if far_ahead {
            s.tokens_far_ahead();
        }
        let first = s.acquire_for("r", "500ms");
        assert_eq!(first > FAR_AHEAD, far_ahead);
        drop(s);
        let second = Pair::of(pair.promoted());
        second.catch_up();
        second.standby.cut_off();
        let lost = second.db.session().await_for("r", "500ms");
        let third = second.fail_over().db;
        assert_eq!(third.cluster.timeline(), 3);
        let last = third.session().await_for("r", "500ms");
        let epochs = [first, lost, last].map(epoch);
        assert!(
            epochs[0] < epochs[1] && epochs[1] < epochs[2],
            "{first}, {lost}, {last} are of the epochs {epochs:?}"
        );
        third.has_lost("r", lost);
    }
}

/// The last server to be promoted has nothing of what the two before it granted, one after the other: it is told that
/// their timelines are taken, as by an archive. The tokens have the epoch of an earlier life, so that the timeline alone
/// does not tell the epoch.
fn promotion_beside_two_others_gives_an_epoch_of_its_own() {
    let first = Pair::new(SHORT);
    let mut s = first.db.session();
    s.tokens_far_ahead();
    s.acquire_for("r", "500ms");
    drop(s);
    let beside = Cluster::builder().conf("recovery_target_timeline", "current");
    let beside = beside.standby_of(&first.db.cluster);
    beside.start();
    first.db.cluster.wait_replayed_by(&beside);
    beside.cut_off();
    let second = first.promoted();
    second.session().await_for("r", "500ms");
    let third = Pair::of(second).promoted();
    let last = third.session().await_for("r", "500ms");
    beside.hear_of_timelines(&third.cluster, &[2, 3]);
    beside.promote();
    let beside = third.at(&Arc::new(beside));
    assert_eq!(beside.cluster.timeline(), 4);
    let next = beside.session().await_for("r", "500ms");
    assert!(epoch(next) > epoch(last), "{next} after {last}");
}

/// Neither knows of the other. What is left is the wall clock, which has gone on meanwhile.
fn standbys_that_took_the_same_timeline_are_ordered_by_the_clock() {
    let pair = Pair::new(SHORT);
    let token = pair.db.session().acquire_for("r", "500ms");
    let sibling = Cluster::builder().standby_of(&pair.db.cluster);
    sibling.start();
    pair.db.cluster.wait_replayed_by(&sibling);
    let one = pair.promoted();
    one.session().await_for("r", "500ms");
    let last = one.session().spend_tokens();
    one.cluster.stop(Stop::Fast);
    let_pass(Duration::from_secs(1));
    sibling.promote();
    let other = one.at(&Arc::new(sibling));
    assert_eq!(other.cluster.timeline(), 2);
    other.has_lost("r", token);
    let next = other.session().await_for("r", "500ms");
    assert!(next > last, "{next} after {last}");
}

fn superseded_token_is_stale_where_its_successor_was_lost() {
    let pair = Pair::new(MAX_TTL);
    let mut s = pair.db.session();
    s.exec("CREATE TABLE doc (id int); SELECT fence_table('doc', 'r')");
    let old = s.acquire_expired("r");
    pair.catch_up();
    pair.standby.cut_off();
    // whoever holds it believes in it from before it asked
    let asked = Instant::now();
    let lost = s.acquire_for("r", "2s");
    drop(s);
    let Promoted { db, .. } = pair.fail_over();
    for token in [old, lost] {
        db.has_lost("r", token);
        let mut s = db.session();
        s.exec(&format!("BEGIN; SET LOCAL leasehold.token = '{token}'"));
        db.refused(&mut s, "INSERT INTO doc VALUES (1)", "LH001");
    }
    let next = first_grant(&db, "r", asked, MAX_TTL_IS);
    assert!(next > lost);
    for token in [old, lost] {
        db.has_lost("r", token);
    }
}

fn prepared_writer_is_waited_for_after_a_promotion() {
    let pair = Pair::new(SHORT);
    let mut s = pair.db.session();
    s.exec("CREATE TABLE doc (id int); SELECT fence_table('doc', 'r')");
    let token = s.acquire_for("r", "500ms");
    s.exec(&format!(
        "BEGIN; SELECT fence('r', {token}); INSERT INTO doc VALUES (1); PREPARE TRANSACTION 'writer'"
    ));
    drop(s);
    let db = pair.promoted();
    let mut s = db.session();
    s.await_for("other", "500ms");
    assert_eq!(s.try_acquire_for("r", "500ms"), None, "not drained");
    db.has_lost("r", token);
    s.exec("COMMIT PREPARED 'writer'");
    assert!(s.acquire_for("r", "500ms") > token);
    // the new holder sees it
    assert_eq!(s.one::<i64>("SELECT count(*) FROM doc"), 1);
}

fn lossless_promotion_keeps_leases() {
    let pair = Pair::new(LOSSLESS);
    let mut s = pair.db.session();
    s.exec("CREATE TABLE doc (id int PRIMARY KEY, n int); INSERT INTO doc VALUES (1, 0)");
    s.exec("SELECT fence_table('doc', 'doc:{id}')");
    let role = pair.db.role();
    s.exec(&format!("GRANT ALL ON doc TO {role}"));
    let token: i64 = pair
        .db
        .session_as(&role)
        .one("SELECT acquire_lease('doc:1', 'worker', '5min')");
    let (stale, current) = s.stale_and_current("late");
    drop(s);
    let db = pair.promoted();
    let mut s = db.session_as(&role);
    assert_eq!(s.state_of("doc:1"), "recovering");
    let known = format!(
        "(token, holder, role::text, durable) = ({token}, 'worker', '{role}', true) AND ttl = '5min'::interval"
    );
    assert!(s.info_says("doc:1", &known));
    assert_eq!(db.session().try_acquire("doc:1"), None, "granted early");
    assert!(s.check_fence("doc:1", token));
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1; COMMIT"
    ));
    assert!(s.renew("doc:1", token) && s.release("doc:1", token));
    // what was over is as it was, and nobody waits where nobody holds
    db.has_lost("late", stale);
    let mut s = db.session();
    assert!(s.renew("late", current));
    let next = s.acquire("doc:1");
    assert!(next > current && s.acquire("new") > next);
    db.has_lost("doc:1", token);
}

fn lossless_promotion_counts_ttls_anew() {
    let pair = Pair::new(LOSSLESS);
    let token = pair.db.session().acquire_for("r", "2s");
    pair.catch_up();
    let Promoted { db, before } = pair.fail_over();
    let next = first_grant(&db, "r", before, Duration::from_secs(2));
    assert!(next > token);
    db.has_lost("r", token);
}

fn lossless_promotion_knows_marked_releases() {
    let pair = Pair::new(LOSSLESS);
    let mut s = pair.db.session();
    let (token, held) = (s.acquire("r"), s.acquire("held"));
    assert!(s.release("r", token));
    drop(s);
    // marks are not waited for, neither by a commit nor by a disk: what counts is that the standby has it
    let mut on = pair.copy().session();
    wait_for("the mark", || {
        let marked = "SELECT released FROM leasehold.ledger WHERE resource = 'r'";
        on.try_one::<bool>(marked).ok()?.then_some(())
    });
    drop(on);
    let db = pair.promoted();
    let mut s = db.session();
    assert_eq!(s.state_of("r"), "free");
    assert!(!s.check_fence("r", token) && !s.renew("r", token));
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH004");
    assert!(s.acquire("r") > token);
    assert_eq!(s.try_acquire("held"), None);
    assert!(s.renew("held", held));
}

fn lossless_promotion_waits_for_memory_leases() {
    let pair = Pair::new(LOSSLESS);
    let in_memory = "SET leasehold.durability = memory";
    let mut s = pair.db.session();
    let durable = s.acquire("durable");
    s.exec(in_memory);
    let token = s.acquire_for("r", "2s");
    drop(s);
    pair.catch_up();
    let Promoted { db, before } = pair.fail_over();
    // gone with the old primary, but its holder may not know
    db.has_lost("r", token);
    assert!(db.session().renew("durable", durable));
    let other = first_grant(&db, "other", before, Duration::from_secs(2));
    assert!(other > token && db.session().acquire("r") > other);
}

fn lossless_promotion_gives_an_epoch_of_its_own() {
    let pair = Pair::new(LOSSLESS);
    let mut s = pair.db.session();
    s.tokens_far_ahead();
    let token = s.acquire("r");
    drop(s);
    let db = pair.promoted();
    let next = db.session().acquire("other");
    assert!(epoch(next) > epoch(token), "{next} after {token}");
    db.cluster.restart(Stop::Fast);
    let last = db.session().acquire("another");
    assert!(last > next, "{last} after {next}");
    assert_eq!(epoch(last), epoch(next), "a restart is no promotion");
}

fn leases_of_a_lossless_promotion_outlive_restarts() {
    let pair = Pair::new(LOSSLESS);
    let token = pair.db.session().acquire("r");
    let db = pair.promoted();
    let mut granted = Vec::new();
    for (round, stop) in [Stop::Fast, Stop::Immediate, Stop::Fast]
        .into_iter()
        .enumerate()
    {
        // the first restart is before anything was granted
        db.cluster.restart(stop);
        let mut s = db.session();
        assert_eq!(s.try_acquire("r"), None);
        assert!(s.check_fence("r", token) && s.renew("r", token));
        let resource = format!("new{round}");
        let token = s.acquire(&resource);
        granted.push((resource, token));
        for (resource, token) in &granted {
            assert!(s.renew(resource, *token), "{resource}");
        }
    }
}
