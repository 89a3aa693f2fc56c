//! The flight recorder: a ring in shared memory of what has happened to leases, so that after an incident one query
//! tells the story of a resource in order.
//!
//! What happens to the record of a resource is written under the lock of its entry, so the numbers of a resource's
//! events are in the order in which things happened. The ring itself is `pg::ring`.

use std::cell::RefCell;

use leasehold_core::name::{HOLDER_BYTES_MAX, RESOURCE_BYTES_MAX};

use crate::errors::Answer;
use crate::pg::fmgr::{Call, Value};
use crate::pg::srf::{Field, Rows};
use crate::pg::{self, Oid, ring};
use crate::stats::{self, Count};
use crate::table::{Bytes, Entry, Holding};
use crate::{api, ledger, sql_function};

sql_function!(
    leasehold_all_events,
    pg_finfo_leasehold_all_events,
    all_events
);

/// What has happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    Granted,
    Denied,
    Shed,
    Renewed,
    Released,
    Expired,
    Broken,
    Drained,
    SessionEnded,
    WriteRefused,
}

impl Kind {
    /// As the view shows it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Granted => "granted",
            Kind::Denied => "denied",
            Kind::Shed => "shed",
            Kind::Renewed => "renewed",
            Kind::Released => "released",
            Kind::Expired => "expired",
            Kind::Broken => "broken",
            Kind::Drained => "drained",
            Kind::SessionEnded => "session_ended",
            Kind::WriteRefused => "write_refused",
        }
    }
}

/// The numbers of an event. What is 0 is not known, or has no meaning for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Facts {
    /// Wall clock.
    pub at: i64,
    /// The token of the lease that it happened to.
    pub token: i64,
    /// The token that was presented.
    pub presented: i64,
    /// The database.
    pub database: Oid,
    /// Its ledger.
    pub ledger: Oid,
    /// The table that was to be written.
    pub relation: Oid,
    /// The role of the lease, or of who was refused.
    pub role: Oid,
    /// The backend that it happened in, or to.
    pub pid: i32,
    /// What.
    pub kind: Kind,
    /// How it was refused; zeros for nothing.
    pub sqlstate: [u8; 5],
}

/// An event that is to be written down.
#[derive(Clone, Copy)]
pub struct Event<'a> {
    facts: Facts,
    /// It happened in this backend, whose application_name goes with it.
    is_own: bool,
    holder: &'a [u8],
    resource: &'a [u8],
}

/// An event as it is kept.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Kept {
    /// Its numbers.
    pub facts: Facts,
    /// The application_name of the backend; empty where it is not known.
    pub application: Bytes<APPLICATION_BYTES_MAX>,
    /// The label of the holder.
    pub holder: Bytes<HOLDER_BYTES_MAX>,
    /// What it is about.
    pub resource: Bytes<RESOURCE_BYTES_MAX>,
}

/// A write that was refused, until the refusal is raised.
#[derive(Debug)]
pub struct RefusedWrite {
    facts: Facts,
    holder: Vec<u8>,
    resource: Vec<u8>,
}

const NO_SQLSTATE: [u8; 5] = [0; 5];

/// What PostgreSQL keeps of an application_name.
const APPLICATION_BYTES_MAX: usize = 63;

impl<'a> Event<'a> {
    /// One that happens now, in this backend, to a resource.
    pub fn now(kind: Kind, ledger: Oid, resource: &'a [u8]) -> Event<'a> {
        Event {
            facts: Facts {
                at: pg::wall_clock(),
                token: 0,
                presented: 0,
                database: pg::database(),
                ledger,
                relation: 0,
                role: 0,
                pid: pg::pid(),
                kind,
                sqlstate: NO_SQLSTATE,
            },
            is_own: true,
            holder: &[],
            resource,
        }
    }

    /// It happened to the lease that this is about.
    pub fn of(mut self, token: i64, holding: &'a Holding) -> Event<'a> {
        self.facts.token = token;
        self.facts.role = holding.role;
        self.holder = holding.holder.as_slice();
        self
    }

    /// It happened to one of this role, who wanted to be that holder.
    pub fn to(mut self, role: Oid, holder: &'a [u8]) -> Event<'a> {
        self.facts.role = role;
        self.holder = holder;
        self
    }

    /// What a session that holds a lease up is told.
    fn told(mut self, pid: i32, sqlstate: &str) -> Event<'a> {
        self.facts.pid = pid;
        self.facts.sqlstate = code_of(sqlstate);
        self.is_own = false;
        self
    }

    /// It happened by itself, to a lease that some other session was granted.
    fn by_itself(mut self, holding: &Holding) -> Event<'a> {
        self.facts.pid = holding.pid;
        self.is_own = false;
        self
    }

    /// Writes it down. Neither raises nor allocates: a lock may be held.
    pub fn record(&self) {
        let write = |application: &[u8]| {
            ring::write(|kept| {
                kept.facts = self.facts;
                kept.application.set(application);
                kept.holder.set(self.holder);
                kept.resource.set(self.resource);
            });
        };
        if self.is_own {
            pg::with_application_name(write);
        } else {
            write(&[]);
        }
    }
}

impl RefusedWrite {
    /// By a check of a presented token against the entry of a resource, or without one.
    pub fn of(ledger: Oid, resource: &[u8], presented: i64, entry: Option<&Entry>) -> RefusedWrite {
        let mut facts = Event::now(Kind::WriteRefused, ledger, resource).facts;
        facts.presented = presented;
        facts.token = entry.map_or(0, |entry| entry.record.t_max);
        facts.role = pg::current_user();
        RefusedWrite {
            facts,
            holder: entry.map_or_else(Vec::new, |entry| entry.holding.holder.as_slice().to_vec()),
            resource: resource.to_vec(),
        }
    }

    /// Of that table.
    pub fn set_relation(&mut self, relation: Oid) {
        self.facts.relation = relation;
    }

    /// Writes it down, under the SQLSTATE that is raised; but not what this backend repeats in a loop. For use where
    /// the refusal is raised, with no lock held.
    pub fn record(&self, sqlstate: &str) {
        let facts = Facts {
            sqlstate: code_of(sqlstate),
            ..self.facts
        };
        if REPEATED.with_borrow_mut(|known| is_loop(known, &facts, &self.resource)) {
            return;
        }
        let event = Event {
            facts,
            is_own: true,
            holder: &self.holder,
            resource: &self.resource,
        };
        event.record();
    }
}

/// So many events of one refused write are written down in [`PAUSE_US`] by one backend.
const REPEATS_MAX: u32 = 10;

/// So many writes are remembered: a job that is tried again and again may be of several.
const REMEMBERED: usize = 16;

/// A write that this backend was refused.
struct Repeated {
    /// Everything about it but the time.
    facts: Facts,
    resource: Vec<u8>,
    /// When it was first refused of the last so many times.
    since_us: i64,
    times: u32,
}

thread_local! {
    /// The last ones, oldest first.
    static REPEATED: RefCell<Vec<Repeated>> = const { RefCell::new(Vec::new()) };
}

/// Whether one more refusal is one of a loop: enough is written down about it.
fn is_loop(known: &mut Vec<Repeated>, facts: &Facts, resource: &[u8]) -> bool {
    let now_us = pg::clock::now_us();
    let facts = Facts { at: 0, ..*facts };
    known.retain(|write| now_us - write.since_us < PAUSE_US);
    let mut same = known.iter_mut();
    if let Some(write) = same.find(|write| write.facts == facts && write.resource == resource) {
        write.times += 1;
        return write.times > REPEATS_MAX;
    }
    if known.len() == REMEMBERED {
        known.remove(0);
    }
    known.push(Repeated {
        facts,
        resource: resource.to_vec(),
        since_us: now_us,
        times: 1,
    });
    false
}

/// Writes down, and counts, that a lease ran out: it is about to be forgotten. The lock of its entry is held.
pub fn ran_out(database: Oid, ledger: Oid, resource: &[u8], entry: &Entry) {
    let holding = &entry.holding;
    let mut event = Event::now(Kind::Expired, ledger, resource)
        .of(entry.record.lease.token, holding)
        .by_itself(holding);
    event.facts.database = database;
    event.record();
    stats::count_in(database, Count::Expiries);
    if let Some(held_us) = entry.held_us(entry.record.lease.deadline_us)
        && database == pg::database()
    {
        stats::held(held_us);
    }
}

/// Writes down, and counts, that a session was told to end, or its statement cancelled, because it held up the lease
/// of a token.
pub fn session_ended(event: &Event, pid: i32, sqlstate: &str) {
    stats::count(Count::SessionsEnded);
    event.told(pid, sqlstate).record();
}

/// Counts that a call was shed, and writes it down: of each resource one a second, as with denials.
pub fn shed(event: Event, hash: u64, sqlstate: &str) {
    stats::count(Count::Sheds);
    if !ring::is_due(hash.rotate_left(32), PAUSE_US, pg::clock::now_us()) {
        return;
    }
    let facts = Facts {
        sqlstate: code_of(sqlstate),
        ..event.facts
    };
    Event { facts, ..event }.record();
}

fn code_of(sqlstate: &str) -> [u8; 5] {
    sqlstate.as_bytes().try_into().unwrap_or(NO_SQLSTATE)
}

/// Pause between two denials, and between two of other kinds, that are noted: a storm must not wash the ring out.
const PAUSE_US: i64 = 1_000_000;

/// Writes down that an acquire was answered NULL: of each resource (and those that share its number) one a second.
/// `holder`: whom it would have been granted to.
pub fn denied(
    ledger: Oid,
    resource: &[u8],
    hash: u64,
    holder: impl FnOnce() -> Bytes<HOLDER_BYTES_MAX>,
) {
    if ring::is_due(hash, PAUSE_US, pg::clock::now_us()) {
        let event = Event::now(Kind::Denied, ledger, resource);
        event.to(pg::current_user(), holder().as_slice()).record();
    }
}

/// The number of the last event.
pub fn last() -> u64 {
    ring::last()
}

/// The first event after `number`, up to `last`, that is not written down yet.
pub fn first_unwritten(number: u64, last: u64) -> Option<u64> {
    ring::first_unwritten(number, last)
}

/// The events after that number that are still there, with their numbers.
pub fn after(number: u64) -> Vec<(u64, Kept)> {
    ring::after(number)
}

/// Writes an event to the server log.
pub fn log(number: u64, event: &Kept) {
    let mut detail = format!(
        "Event {number} of database {}, process {}",
        event.facts.database, event.facts.pid
    );
    for (name, token) in [
        ("token", event.facts.token),
        ("presented", event.facts.presented),
    ] {
        if token != 0 {
            detail.push_str(&format!(", {name} {token}"));
        }
    }
    for (name, text) in [
        ("holder", event.holder.as_slice()),
        ("application", event.application.as_slice()),
    ] {
        if !text.is_empty() {
            detail.push_str(&format!(", {name} \"{}\"", String::from_utf8_lossy(text)));
        }
    }
    if event.facts.sqlstate != NO_SQLSTATE {
        detail.push_str(", SQLSTATE ");
        detail.push_str(&String::from_utf8_lossy(&event.facts.sqlstate));
    }
    if event.facts.relation != 0 {
        detail.push_str(&format!(", relation {}", event.facts.relation));
    }
    detail.push('.');
    let resource = String::from_utf8_lossy(event.resource.as_slice());
    pg::log(
        &format!(
            "lease {}: \"{resource}\"",
            event.facts.kind.name().replace('_', " ")
        ),
        &detail,
    );
}

/// The worker of a database, in a transaction: sends the events after `from` up to `up_to` to those who listen on a
/// channel. Who holds a lease is left out: anybody can listen.
pub fn tell(database: Oid, channel: &[u8], from: u64, up_to: u64) -> Answer<()> {
    let ledger = ledger::oid()?;
    for (number, event) in ring::after(from) {
        let facts = &event.facts;
        if number <= up_to && (facts.database, facts.ledger) == (database, ledger) {
            let resource = event.resource.as_slice();
            ledger::tell(
                ledger,
                channel,
                number,
                facts.kind.name(),
                resource,
                facts.token,
            )?;
        }
    }
    Ok(())
}

/// leasehold.all_events() RETURNS TABLE: what the view leasehold.events shows
fn all_events(call: &Call) -> Answer<Value> {
    api::check_preloaded()?;
    let (database, ledger) = (pg::database(), ledger::oid()?);
    let mut rows = Rows::start(call);
    for (number, event) in ring::after(0) {
        if (event.facts.database, event.facts.ledger) != (database, ledger) {
            continue;
        }
        let facts = &event.facts;
        rows.push(&[
            Field::I64(number as i64),
            Field::Timestamp(facts.at),
            Field::Text(facts.kind.name().as_bytes()),
            Field::Text(event.resource.as_slice()),
            Field::unless_zero(facts.token, Field::I64),
            Field::unless_zero(facts.presented, Field::I64),
            Field::unless_empty(event.holder.as_slice()),
            match facts.sqlstate {
                NO_SQLSTATE => Field::Null,
                _ => Field::Text(&facts.sqlstate),
            },
            Field::unless_zero(facts.relation, Field::Oid),
            Field::unless_zero(facts.role, Field::Oid),
            Field::I32(facts.pid),
            Field::unless_empty(event.application.as_slice()),
        ]);
    }
    Ok(Value::Void)
}
