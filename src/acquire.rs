//! Acquiring: from a free resource to a lease that comes with the commit.

use std::cell::{Cell, RefCell};

use leasehold_core::name::{HOLDER_BYTES_MAX, default_holder};
use leasehold_core::record::{Begin, End};

use crate::drain::Drained;
use crate::errors::{Answer, Refusal, code};
use crate::events::{Event, Kind};
use crate::fence::Presented;
use crate::ledger::{self, NewRow};
use crate::resources::{self, Resource};
use crate::stats::{self, Count};
use crate::table::{self, Bytes, Database, Entry, Holding};
use crate::wait::{Stay, Waiting};
use crate::xact::{self, Checked};
use crate::{drain, errors, events, fence, pg, rights, settings, tokens, wait};

/// A request, with its arguments checked.
pub struct Request {
    /// What is asked for.
    pub resource: Resource,
    /// The label; None for the default one.
    pub holder: Option<Vec<u8>>,
    /// For how long.
    pub ttl_us: i64,
    /// In the ledger, or in memory only.
    pub durable: bool,
    /// How long it waits: 0 not at all, `i64::MAX` for as long as it takes.
    pub wait_us: i64,
    /// What the caller calls it: the same again is a retry.
    pub request: Option<table::Request>,
    /// A JSON text that is kept with the lease.
    pub metadata: Option<Vec<u8>>,
}

/// A grant that is in progress, and not recorded yet.
#[derive(Clone, Copy)]
struct Begun {
    /// Since when the last lease is over.
    over_us: i64,
    /// It was in the queue before.
    has_queued: bool,
}

/// What comes of a look at the resource.
enum Look {
    /// The grant is in progress.
    Begun(Begun),
    /// It is a retry: this lease was granted to it, to a role.
    Again(i64, pg::Oid),
    /// A grant is in progress whose transaction, of this owner, is open for longer than its lease, since then.
    Overdue(u64, i64),
    /// Whoever may wait has to; the others are refused.
    NotNow(Stay),
    /// It would be in its own way: waiting is of no use.
    OwnWay,
}

/// The token, or None where the resource could not be had in time. `pause` is called before each sleep.
pub fn acquire(request: &Request, pause: impl Fn()) -> Answer<Option<i64>> {
    let resource = &request.resource;
    check_right(request)?;
    if request.wait_us == 0 {
        // the common refusal first: it takes a shared lock and nothing else
        let is_taken = |entry: &Entry| {
            let is_retry = request.request.is_some() && entry.holding.request == request.request;
            !is_retry && is_live(entry)
        };
        if table::refuses(resource.key(), is_taken) {
            denied(request);
            return Ok(None);
        }
    }
    let mut waiting = Waiting::new(resource, request.wait_us);
    waiting.prepare(request.request, || label(request, pg::pid()));
    loop {
        match attempt(request, &waiting, &pause)? {
            Attempt::Done(token) => {
                if token.is_none() {
                    table::refuses(resource.key(), |_| true);
                    denied(request);
                }
                return Ok(token);
            }
            Attempt::Asleep(until_us) => {
                pause();
                waiting.sleep(until_us)?;
                // the right to it, or the whole extension, may be gone
                check_right(request)?;
                if ledger::oid()? != resource.ledger {
                    return Err(errors::no_ledger());
                }
            }
        }
    }
}

/// 42501, but not for a retry: a rule does not end a lease.
fn check_right(request: &Request) -> Answer<()> {
    let resource = &request.resource;
    rights::check(resource).or_else(|refusal| {
        let is_retry = request.request.is_some()
            && refusal.sqlstate == code::INSUFFICIENT_PRIVILEGE
            && is_retry(request, &resources::database(resource.ledger)?)?;
        if is_retry { Ok(()) } else { Err(refusal) }
    })
}

fn denied(request: &Request) {
    let resource = &request.resource;
    stats::count(Count::Denials);
    events::denied(resource.ledger, &resource.name, resource.hash, || {
        label(request, pg::pid())
    });
}

enum Attempt {
    Done(Option<i64>),
    Asleep(i64),
}

fn is_live(entry: &Entry) -> bool {
    entry.record.is_live(pg::clock::now_us())
}

/// Whether a lease lives that the same request was granted before: then it needs neither room nor time. Also where
/// only the ledger knows of it.
fn is_retry(request: &Request, database: &Database) -> Answer<bool> {
    if request.request.is_none() {
        return Ok(false);
    }
    let entry = request.resource.find(database)?.entry();
    let granted = entry.granted_before(request.request, xact::owner(), pg::clock::now_us());
    Ok(granted.is_some())
}

/// One try, to its end or to where it has to sleep.
fn attempt(request: &Request, waiting: &Waiting, pause: &impl Fn()) -> Answer<Attempt> {
    let resource = &request.resource;
    let database = resources::database(resource.ledger)?;
    let is_retry = is_retry(request, &database)?;
    if !is_retry {
        rights::check_quota()?;
    }
    loop {
        let now_us = pg::clock::now_us();
        if now_us < database.grace_until_us && !waiting.waits() && !is_retry {
            return Ok(Attempt::Done(None));
        }
        if !database.has_tokens() && !is_live(&resource.open(&database)?) {
            tokens::ensure(resource.ledger)?;
            // it has given the transaction a number, which must not be held through a drain
            pause();
        }
        match look(request, waiting, &database) {
            Some(Look::Begun(begun)) => {
                if request.request.is_some() {
                    // it may have been let in as a retry of a lease that is over by now
                    rights::check(resource)?;
                }
                match take_over(request, waiting, &database, begun)? {
                    TakeOver::Granted(token) => return Ok(Attempt::Done(Some(token))),
                    TakeOver::InVain => {
                        waiting.check_timeout()?;
                        return Ok(Attempt::Done(None));
                    }
                    TakeOver::Deserted => {}
                }
            }
            Some(Look::Again(token, role)) => {
                fence::check_role(resource, role, "acquire again")?;
                // what an own acquire presents, a retry of it does
                let presented = Presented {
                    tokens: &[token],
                    named: true,
                    strict: false,
                };
                fence::pass(resource, presented)?;
                return Ok(Attempt::Done(Some(token)));
            }
            Some(Look::Overdue(owner, over_us)) => {
                waiting.drains();
                // whoever waits looks again in any case
                let is_over = drain::drain_grant(resource, owner, over_us, waiting.until_us())?;
                waiting.check_timeout()?;
                if !is_over && pg::clock::now_us() >= waiting.until_us() {
                    return Ok(Attempt::Done(None));
                }
            }
            Some(Look::NotNow(Stay::Sleep(until_us))) => return Ok(Attempt::Asleep(until_us)),
            Some(Look::NotNow(stay)) => {
                let Some(refusal) = wait::shed(resource, &stay, request.wait_us) else {
                    return Ok(Attempt::Done(None));
                };
                table::change(resource.key(), |entry| {
                    let sheds = &mut entry.contention.sheds;
                    *sheds = sheds.saturating_add(1);
                });
                let holder = label(request, pg::pid());
                let event = Event::now(Kind::Shed, resource.ledger, &resource.name);
                let event = event.to(pg::current_user(), holder.as_slice());
                events::shed(event, resource.hash, refusal.sqlstate);
                return Err(refusal);
            }
            Some(Look::OwnWay) => return Ok(Attempt::Done(None)),
            // there is none, or it was reclaimed in between, by others that need room
            None => {
                resource.open(&database)?;
            }
        }
    }
}

/// What is written of a grant that is recorded.
fn finish(
    request: &Request,
    database: &Database,
    granted: &Granted,
    holding: &Holding,
) -> Answer<()> {
    if !database.is_home {
        tokens::move_in(database)?;
    }
    if request.durable {
        tokens::note_ttl(database, request.ttl_us)?;
        make_durable(request, granted.token, holding)?;
        xact::grant_needs_the_disk();
    } else {
        write_for_memory(request, granted, database)?;
    }
    if pg::snapshot_is_fixed() {
        xact::grant_stands_alone();
    }
    Ok(())
}

/// A lease in memory writes nothing of its own. But what a server that is started next must know of it has to be
/// there, and kept, before it counts.
fn write_for_memory(request: &Request, granted: &Granted, database: &Database) -> Answer<()> {
    let resource = &request.resource;
    if granted.row_open {
        // a server that is started next would believe in the older lease that the ledger knows
        ledger::mark_released(resource.ledger, &resource.name, granted.token)?;
        tokens::note_marked(pg::database(), resource.ledger, pg::own_wal());
        xact::closed_row(resource, granted.token);
    }
    let is_known = database.is_home && request.ttl_us <= database.memory_ttl_us;
    if !is_known || granted.row_open || !pg::wal_is_kept(granted.marked_lsn) {
        tokens::raise_memory_ttl(resource.ledger, request.ttl_us)?;
        xact::grant_needs_the_disk();
    }
    Ok(())
}

/// Looks whether it is this request's turn, and whether the resource can be had; if so, puts the grant in progress,
/// so that nobody else begins one. Noted first, so that an error undoes it. Whatever the outcome, a lease that is
/// over is closed to further transactions. None where there is no entry.
fn look(request: &Request, waiting: &Waiting, database: &Database) -> Option<Look> {
    let resource = &request.resource;
    xact::prepare_grant();
    let noted = resource.clone();
    let owner = xact::owner();
    let max_waiters = settings::max_waiters();
    let is_in_own_way = xact::is_in_own_way(resource);
    let is_ending = xact::is_ending(resource);
    let seen = table::change(resource.key(), |entry| {
        let now_us = pg::clock::now_us();
        let before = entry.granted_before(request.request, owner, now_us);
        if let Some((token, role)) = before.filter(|_| !is_ending) {
            return Look::Again(token, role);
        }
        if entry.record.grant.owner == owner || (is_in_own_way && waiting.waits()) {
            return Look::OwnWay;
        }
        let grace_us = database.grace_until_us;
        if !waiting.is_turn(&mut entry.queue, now_us) || now_us < grace_us {
            return Look::NotNow(waiting.stay(entry, grace_us, max_waiters, now_us));
        }
        let over_us = entry.record.over_since_us(now_us).unwrap_or(now_us);
        match entry.record.begin(owner, now_us) {
            Begin::Begun => Look::Begun(Begun {
                over_us,
                has_queued: waiting.has_turn(&mut entry.queue),
            }),
            Begin::InProgress | Begin::Held => {
                let overdue = entry.record.want_overdue(now_us);
                match (waiting.stay(entry, 0, max_waiters, now_us), overdue) {
                    (Stay::Sleep(_) | Stay::TimeIsOver, Some((owner, over_us))) => {
                        Look::Overdue(owner, over_us)
                    }
                    (stay, _) => Look::NotNow(stay),
                }
            }
        }
    });
    if matches!(seen, Some(Look::Begun(_))) {
        xact::grant_begun(noted);
    }
    seen
}

struct Granted {
    token: i64,
    /// The ledger has a row of an older lease that is not marked released.
    row_open: bool,
    /// The last lease ran out.
    is_takeover: bool,
    /// So far the WAL must be kept for a lease in memory to rely on a row that is marked, or gone.
    marked_lsn: u64,
}

/// What comes of a grant that was begun.
enum TakeOver {
    /// Under this token.
    Granted(i64),
    /// Old transactions were still open when the time was over.
    InVain,
    /// It was taken for deserted, and another has begun his: this process was stopped.
    Deserted,
}

/// Drains: takes the fence for the moment in which the grant is recorded, and stays inside it.
fn take_over(
    request: &Request,
    waiting: &Waiting,
    database: &Database,
    begun: Begun,
) -> Answer<TakeOver> {
    let resource = &request.resource;
    // this transaction may itself have written under an older token
    let own_old = xact::checked(resource.hash, &resource.name, |_| ()).is_some();
    let drained = if own_old {
        Drained::InVain
    } else {
        drain::drain(resource, begun.over_us, waiting)?
    };
    match drained {
        Drained::Yes => {}
        Drained::InVain => {
            table::change(resource.key(), |entry| entry.record.abort(xact::owner()));
            xact::grant_abandoned();
            return Ok(TakeOver::InVain);
        }
        Drained::Deserted => {
            xact::grant_abandoned();
            return Ok(TakeOver::Deserted);
        }
    }
    // in a lone statement the exclusive lock stays: the transaction ends at once, and until then nobody but
    // it may use the token anyhow
    let is_lone = !pg::more_may_follow();
    pg::sessions::open();
    if !is_lone {
        pg::heavy::share_fence(resource.hash);
    }
    let holding = holding(request);
    let granted = loop {
        match rights::within_quota(|| record(request, database, &holding, begun))? {
            Recorded::Granted(granted) => break Some(granted),
            Recorded::NotMine => break None,
            Recorded::NoTokens => tokens::ensure(resource.ledger)?,
        }
    };
    if granted.is_none() || !is_lone {
        pg::heavy::readmit_fence(resource.hash);
    }
    let Some(granted) = granted else {
        if !is_lone {
            pg::heavy::leave_fence(resource.hash);
        }
        xact::grant_abandoned();
        return Ok(TakeOver::Deserted);
    };
    xact::grant_recorded(granted.token, granted.is_takeover);
    xact::note_checked(
        resource.hash,
        Checked {
            resource: resource.name.clone(),
            token: granted.token,
            deadline_us: pg::clock::now_us().saturating_add(request.ttl_us),
            named: true,
            role: None,
            users: fence::users(),
        },
    );
    finish(request, database, &granted, &holding)?;
    Ok(TakeOver::Granted(granted.token))
}

/// What comes of recording it.
enum Recorded {
    Granted(Granted),
    /// Another grant is in progress.
    NotMine,
    /// The block of tokens is used up.
    NoTokens,
}

/// Records the grant under the next token.
fn record(
    request: &Request,
    database: &Database,
    holding: &Holding,
    begun: Begun,
) -> Answer<Recorded> {
    let resource = &request.resource;
    let owner = xact::owner();
    let recorded = table::change(resource.key(), |entry| {
        if entry.record.grant.owner != owner {
            return Ok(Recorded::NotMine);
        }
        let Some((token, marked_lsn)) = database.take_token() else {
            return Ok(Recorded::NoTokens);
        };
        let now_us = pg::clock::now_us();
        let row_open = entry.record.row_open;
        let lease = &entry.record.lease;
        let is_takeover =
            lease.token != 0 && lease.end == End::Running && now_us >= lease.deadline_us;
        // noted once, though the grant be undone and another follow
        if entry.record.has_run_out(now_us) {
            events::ran_out(pg::database(), resource.ledger, &resource.name, entry);
        }
        if !entry
            .record
            .grant(owner, token, request.ttl_us, request.durable, now_us)
        {
            return Err((token, entry.record.t_max));
        }
        // where this one waited, what comes between the two counts for those who wait behind it
        entry.hold_ends(if begun.has_queued {
            now_us
        } else {
            entry.record.lease.deadline_us
        });
        entry.holding = *holding;
        Ok(Recorded::Granted(Granted {
            token,
            row_open,
            is_takeover,
            marked_lsn,
        }))
    });
    match recorded {
        Some(Ok(recorded)) => Ok(recorded),
        Some(Err((token, t_max))) => Err(token_behind(resource, token, t_max)),
        // deserted, taken by another, and gone since
        None => Ok(Recorded::NotMine),
    }
}

fn holding(request: &Request) -> Holding {
    let pid = pg::pid();
    Holding {
        holder: label(request, pid),
        role: pg::current_user(),
        pid,
        granted_at: pg::wall_clock(),
        renewed_at: 0,
        granted_by: if request.durable {
            pg::transaction_number()
        } else {
            0
        },
        // read after the fence was had: the earlier holders' transactions are all counted
        granted_after: if request.durable {
            0
        } else {
            pg::ended_transactions()
        },
        request: request.request,
    }
}

fn label(request: &Request, pid: i32) -> Bytes<HOLDER_BYTES_MAX> {
    match &request.holder {
        Some(label) => Bytes::new(label),
        None => own_label(pid),
    }
}

thread_local! {
    /// The default label, and what it was made of: session user and application_name.
    static LABEL: RefCell<Option<(pg::Oid, Vec<u8>, Bytes<HOLDER_BYTES_MAX>)>> = const { RefCell::new(None) };
    static ROLES_CHANGED: Cell<bool> = const { Cell::new(true) };
}

/// A role may have another name. Neither raises nor allocates.
pub fn role_changed() {
    ROLES_CHANGED.set(true);
}

/// The label of who does not bring one.
fn own_label(pid: i32) -> Bytes<HOLDER_BYTES_MAX> {
    let session_user = pg::session_user();
    let known = LABEL.with_borrow(|label| match label {
        Some((user, application, label))
            if *user == session_user && pg::application_name_is(application) =>
        {
            Some(*label)
        }
        _ => None,
    });
    if let Some(label) = known.filter(|_| !ROLES_CHANGED.get()) {
        return label;
    }
    pg::hooks::watch_catalogs();
    ROLES_CHANGED.set(false);
    let user = pg::role_name(session_user);
    let label = default_holder(&user, &pg::application_name(), pid);
    let label = Bytes::new(&pg::encoding::to_server(&label));
    LABEL.set(Some((session_user, pg::raw_application_name(), label)));
    label
}

fn make_durable(request: &Request, token: i64, holding: &Holding) -> Answer<()> {
    let resource = &request.resource;
    let written = ledger::write(
        resource.ledger,
        &NewRow {
            resource: &resource.name,
            token,
            ttl_us: request.ttl_us,
            holder: holding.holder.as_slice(),
            role: holding.role,
            granted_at: holding.granted_at,
            request: request.request,
        },
    )?;
    if !written {
        return Err(token_behind(resource, token, i64::MAX));
    }
    match &request.metadata {
        Some(text) => ledger::put_metadata(resource.ledger, &resource.name, token, text),
        None => Ok(()),
    }
}

/// The ledger is ahead of the sequence: somebody changed one of them by hand.
fn token_behind(resource: &Resource, token: i64, t_max: i64) -> Refusal {
    Refusal::new(
        code::INTERNAL,
        format!("token {token} for resource \"{}\" is not above its last one", resource.shown()),
    )
    .detail(if t_max == i64::MAX {
        "The ledger holds a higher token than the sequence, or has lost the row of the resource.".to_owned()
    } else {
        format!("The last one is {t_max}: leasehold.ledger or leasehold.token_seq was changed by hand.")
    })
    .hint("SELECT setval('leasehold.token_seq', (SELECT max(token) FROM leasehold.ledger)); then restart the server.")
}

/// Where the snapshot is older than the grant, the taker would not see the last holder's writes.
pub fn check_context(call: &str) -> Answer<()> {
    if pg::in_recovery() {
        return Err(errors::on_standby(call));
    }
    if pg::read_only_transaction() {
        return Err(errors::read_only(call, "A grant is written to the ledger."));
    }
    if pg::snapshot_is_fixed() && pg::more_may_follow() {
        return Err(not_alone());
    }
    Ok(())
}

/// 25001: other statements share the snapshot.
pub fn not_alone() -> Refusal {
    Refusal::new(
        code::ACTIVE_TRANSACTION,
        "acquire_lease() cannot run in a REPEATABLE READ or SERIALIZABLE transaction block",
    )
    .detail("The transaction's snapshot is older than the grant would be, so it could not see what the last holder wrote.")
    .hint("Acquire in a statement of its own, before BEGIN ISOLATION LEVEL REPEATABLE READ, or use READ COMMITTED.")
}
