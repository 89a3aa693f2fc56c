//! Drain: a new grant waits for the transactions that are still open under an old token, and ends the
//! zombies among them.
//!
//! - A transaction that is ending anyway is waited for a moment: it may be in the middle of its commit, which is
//!   never cut off.
//! - Once its lease has been over for `leasehold.zombie_grace`, a transaction is a zombie that nothing good
//!   can come of: what it would still write could only be refused. `leasehold.zombie_policy` says what is
//!   done. Who it is, and that it is still that very transaction, is `pg::sessions`' business.
//! - A prepared transaction has no session that could be ended: it is reported.
//!
//! A transaction that was granted the resource and stays open for longer than its lease is one of them: it
//! has no lease before it commits, and holds the resource up all the same.
//!
//! Whoever drains an old lease has the grant in progress, so it is one taker at a time; the others are refused
//! at once.

use std::cell::Cell;

use crate::errors::{self, Answer, code};
use crate::events::{self, Event, Kind};
use crate::pg::sessions::{self, Drain, Fate};
use crate::pg::{self, heavy};
use crate::resources::Resource;
use crate::stats::{self, Count};
use crate::wait::Waiting;
use crate::{ledger, settings, table, xact};

/// How long what is ending by itself is waited for.
const MOMENT_US: i64 = 10_000;
/// How long a session that was told to end is waited for. The next taker goes on from there.
const ASKED_US: i64 = 200_000;
/// Prepared transactions and the worker, which deletes old rows under the fence, end without waking anybody: so
/// often a taker looks, and less and less often the longer it waits.
const LOOK_AGAIN_US: std::ops::RangeInclusive<i64> = 2_000..=50_000;
/// A taker that is in the queue of its resource looks there so often.
const QUEUED_US: i64 = 500_000;

/// What comes of a drain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drained {
    /// The fence lock is held in exclusive mode.
    Yes,
    /// It can't be had: the grant must be given up for now.
    InVain,
    /// The grant in progress is not this taker's any more: his process was stopped for too long.
    Deserted,
}

/// Takes the fence lock in exclusive mode, as soon as nobody is inside under an old token. `over_us`: since when the
/// last lease is over. A taker that waits does so in any case.
pub fn drain(resource: &Resource, over_us: i64, waiting: &Waiting) -> Answer<Drained> {
    if heavy::try_exclude_fence(resource.hash) {
        return Ok(Drained::Yes);
    }
    waiting.drains();
    let until_us = waiting.until_us();
    let owner = xact::owner();
    let is_deserted = Cell::new(false);
    let is_drained = wait_out(resource, over_us, until_us, || {
        // who waits for long must be seen to be there, or another takes his place
        let is_mine = until_us == 0
            || table::change(resource.key(), |entry| {
                entry.record.attend(owner, pg::clock::now_us())
            }) == Some(true);
        is_deserted.set(!is_mine);
        !is_mine || heavy::try_exclude_fence(resource.hash)
    })?;
    if is_deserted.get() {
        return Ok(Drained::Deserted);
    }
    if is_drained {
        stats::count(Count::Drains);
        table::read(resource.key(), |entry| {
            let event = Event::now(Kind::Drained, resource.ledger, &resource.name);
            event.of(entry.record.lease.token, &entry.holding).record();
        });
    }
    Ok(if is_drained {
        Drained::Yes
    } else {
        Drained::InVain
    })
}

/// Waits until a grant is no longer in progress whose transaction is open for longer than its lease. Nobody
/// else is inside: it holds the fence. A taker that waits comes back after a while all the same: he is in the
/// queue, and must be seen to look.
pub fn drain_grant(resource: &Resource, owner: u64, over_us: i64, until_us: i64) -> Answer<bool> {
    let until_us = until_us.min(pg::clock::now_us().saturating_add(QUEUED_US));
    wait_out(resource, over_us, until_us, || {
        table::read(resource.key(), |entry| entry.record.grant.owner) != Some(owner)
    })
}

/// Waits for what `is_done` says, and ends those who are in its way as far as that is allowed.
fn wait_out(
    resource: &Resource,
    over_us: i64,
    until_us: i64,
    is_done: impl Fn() -> bool,
) -> Answer<bool> {
    let mut sleeper = Drain::prepare();
    let begun_us = pg::clock::now_us();
    let mut give_up_us = begun_us.saturating_add(MOMENT_US);
    let mut is_reported = false;
    loop {
        // before the question whether it is still this taker's business: who comes to hold it later is none
        let holders = heavy::fence_holders(resource.hash);
        if is_done() {
            return Ok(true);
        }
        let now_us = pg::clock::now_us();
        let grace_us = over_us.saturating_add(settings::zombie_grace_us());
        let is_past_grace = now_us >= grace_us;
        // the lock is of a hash: who holds it may be inside another resource, whose lease is live
        let may = is_past_grace && !table::has_twin(resource.key());
        let policy = settings::zombie_policy();
        let mut is_anyone_left = false;
        // now: whose session is ended may be gone, and its grant with it, before anything is told of it
        let token = table::read(resource.key(), |entry| match entry.record.grant.token {
            0 => entry.record.lease.token,
            token => token,
        });
        for holder in holders {
            match sessions::ask(holder, policy, may, now_us) {
                Fate::Ending => {}
                Fate::Left => is_anyone_left = true,
                Fate::Asked => give_up_us = give_up_us.max(begun_us.saturating_add(ASKED_US)),
                fate @ (Fate::Cancelled(_) | Fate::Ended(_)) => {
                    give_up_us = now_us.saturating_add(ASKED_US);
                    report(resource, token.unwrap_or_default(), over_us, now_us, fate);
                }
            }
        }
        if !is_anyone_left && now_us >= give_up_us && is_past_grace && !is_reported {
            // what is left has no session that could be ended
            drop(sleeper);
            report_prepared(resource)?;
            is_reported = true;
            sleeper = Drain::prepare();
            continue;
        }
        if (is_anyone_left || now_us >= give_up_us) && now_us >= until_us {
            return Ok(false);
        }
        let pause_us = (now_us.saturating_sub(begun_us) / 16)
            .clamp(*LOOK_AGAIN_US.start(), *LOOK_AGAIN_US.end());
        let pause_us = if is_past_grace {
            pause_us
        } else {
            pause_us.min(grace_us.saturating_sub(now_us))
        };
        sleeper.wait(pause_us.saturating_add(999) / 1000);
    }
}

fn report(resource: &Resource, token: i64, over_us: i64, now_us: i64, fate: Fate) {
    let (what, pid, sqlstate) = match fate {
        Fate::Cancelled(pid) => (
            "cancelled the statement of process",
            pid,
            code::QUERY_CANCELED,
        ),
        Fate::Ended(pid) => ("ended the session of process", pid, code::ADMIN_SHUTDOWN),
        _ => return,
    };
    table::read(resource.key(), |entry| {
        let event = Event::now(Kind::SessionEnded, resource.ledger, &resource.name);
        events::session_ended(&event.of(token, &entry.holding), pid, sqlstate);
    });
    pg::log(
        &format!("leasehold {what} {pid}, whose transaction held up a lease"),
        &format!(
            "Resource \"{}\": the lease of token {token} has been over for {}, and process {} ({}) wants it.",
            resource.shown(),
            errors::seconds(now_us.saturating_sub(over_us)),
            pg::pid(),
            pg::application_name()
        ),
    );
}

/// Once per lease, in the server log.
fn report_prepared(resource: &Resource) -> Answer<()> {
    if table::read(resource.key(), |entry| entry.is_hold_up_reported) != Some(false) {
        return Ok(());
    }
    for name in ledger::prepared_holders(resource.ledger, resource.hash)? {
        table::change(resource.key(), |entry| entry.is_hold_up_reported = true);
        pg::log(
            &format!(
                "prepared transaction \"{}\" holds up a lease",
                errors::shown(&name)
            ),
            &format!(
                "Resource \"{}\" cannot be granted before it is resolved: COMMIT PREPARED or ROLLBACK PREPARED.",
                resource.shown()
            ),
        );
    }
    Ok(())
}
