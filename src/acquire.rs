//! Acquiring: from a free resource to a lease that comes with the commit.

use leasehold_core::name::default_holder;
use leasehold_core::record::Begin;

use crate::errors::{Answer, Refusal, code};
use crate::ledger::{self, NewRow};
use crate::resources::{self, Resource};
use crate::table::{self, Bytes, Database, Holding};
use crate::xact::{self, Checked};
use crate::{errors, fence, pg, tokens};

/// A request, with its arguments checked.
pub struct Request {
    /// What is asked for.
    pub resource: Resource,
    /// The label; None for the default one.
    pub holder: Option<Vec<u8>>,
    /// For how long.
    pub ttl_us: i64,
}

/// The token, or None where the resource is held, being granted, or not drained yet.
pub fn acquire(request: &Request) -> Answer<Option<i64>> {
    let resource = &request.resource;
    // the common refusal first: it takes a shared lock and nothing else
    if table::read(resource.key(), |entry| {
        entry.record.is_live(pg::clock::now_us())
    }) == Some(true)
    {
        return Ok(None);
    }
    let database = resources::database(resource.ledger)?;
    if pg::clock::now_us() < database.lossy_until_us {
        return Ok(None);
    }
    let begun = loop {
        if resource
            .open(&database)?
            .record
            .is_live(pg::clock::now_us())
        {
            return Ok(None);
        }
        tokens::ensure(resource.ledger)?;
        // None: the entry was reclaimed in between, by others that need room
        if let Some(begun) = begin(request) {
            break begun;
        }
    };
    if begun != Begin::Begun {
        return Ok(None);
    }
    let Some(granted) = take_over(request)? else {
        return Ok(None);
    };
    make_durable(request, &granted, &database)?;
    if pg::snapshot_is_fixed() {
        xact::grant_stands_alone();
    }
    Ok(Some(granted.token))
}

/// Puts the grant in progress, so that nobody else begins one; noted first, so that an error undoes
/// it. Whatever the outcome, a lease that is over is closed to further transactions.
fn begin(request: &Request) -> Option<Begin> {
    let resource = &request.resource;
    xact::prepare_grant();
    let noted = resource.clone();
    let (owner, now_us) = (xact::owner(), pg::clock::now_us());
    let begun = table::change(resource.key(), |entry| entry.record.begin(owner, now_us));
    if begun == Some(Begin::Begun) {
        xact::grant_begun(noted);
    }
    begun
}

struct Granted {
    token: i64,
    /// The worker may be marking the last lease as released.
    marked_now: bool,
    holding: Holding,
}

/// Drains: takes the fence for the moment in which the grant is recorded, and stays inside it.
fn take_over(request: &Request) -> Answer<Option<Granted>> {
    let resource = &request.resource;
    // this transaction may itself have written under an older token
    let own_old = xact::checked(resource.hash, &resource.name, |_| ()).is_some();
    if own_old || !pg::heavy::try_exclude_fence(resource.hash) {
        table::change(resource.key(), |entry| entry.record.abort(xact::owner()));
        xact::grant_abandoned();
        return Ok(None);
    }
    pg::heavy::share_fence(resource.hash);
    let holding = holding(request);
    let (token, marked_now) = loop {
        if let Some(recorded) = record(request, &holding)? {
            break recorded;
        }
        tokens::ensure(resource.ledger)?;
    };
    pg::heavy::readmit_fence(resource.hash);
    xact::grant_recorded(token);
    xact::note_checked(
        resource.hash,
        Checked {
            resource: resource.name.clone(),
            token,
            deadline_us: pg::clock::now_us().saturating_add(request.ttl_us),
            named: true,
            role: None,
            users: fence::users(),
        },
    );
    Ok(Some(Granted {
        token,
        marked_now,
        holding,
    }))
}

/// Records the grant under the next token, or None when the block of tokens is used up.
fn record(request: &Request, holding: &Holding) -> Answer<Option<(i64, bool)>> {
    let resource = &request.resource;
    let owner = xact::owner();
    let recorded = table::change(resource.key(), |entry| {
        let Some(token) = tokens::take(resource.ledger) else {
            return Ok(None);
        };
        let now_us = pg::clock::now_us();
        if !entry.record.grant(owner, token, request.ttl_us, now_us) {
            return Err((token, entry.record.t_max));
        }
        entry.holding = *holding;
        Ok(Some((token, entry.is_being_marked)))
    });
    match recorded {
        Some(Ok(recorded)) => Ok(recorded),
        Some(Err((token, t_max))) => Err(token_behind(resource, token, t_max)),
        None => Err(internal("an entry with a grant in progress was reclaimed")),
    }
}

fn holding(request: &Request) -> Holding {
    let pid = pg::pid();
    let label = match &request.holder {
        Some(label) => Bytes::new(label),
        None => {
            let user = pg::role_name(pg::session_user());
            let label = default_holder(&user, &pg::application_name(), pid);
            Bytes::new(&pg::encoding::to_server(&label))
        }
    };
    Holding {
        holder: label,
        role: pg::current_user(),
        pid,
        granted_at: pg::wall_clock(),
        renewed_at: 0,
        granted_by: pg::transaction_number(),
    }
}

fn make_durable(request: &Request, granted: &Granted, database: &Database) -> Answer<()> {
    let resource = &request.resource;
    let written = ledger::write(
        resource.ledger,
        &NewRow {
            resource: &resource.name,
            token: granted.token,
            ttl_us: request.ttl_us,
            holder: granted.holding.holder.as_slice(),
            role: granted.holding.role,
            granted_at: granted.holding.granted_at,
        },
        granted.marked_now,
    )?;
    if !written {
        return Err(token_behind(resource, granted.token, i64::MAX));
    }
    if !database.is_home {
        let lost_up_to = if database.promoted { database.floor } else { 0 };
        if ledger::move_in(resource.ledger, lost_up_to)? {
            xact::moved_in(resource.ledger);
        }
    }
    Ok(())
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

fn internal(what: &str) -> Refusal {
    Refusal::new(code::INTERNAL, what)
}

/// Where the snapshot is older than the grant, the taker would not see the last holder's writes.
pub fn check_context() -> Answer<()> {
    if pg::in_recovery() {
        return Err(errors::on_standby("acquire_lease()"));
    }
    if pg::read_only_transaction() {
        return Err(errors::read_only(
            "acquire_lease()",
            "A grant is written to the ledger.",
        ));
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
