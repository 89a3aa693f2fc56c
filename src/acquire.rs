//! Acquiring: from a free resource to a lease that comes with the commit.

use std::cell::{Cell, RefCell};

use leasehold_core::name::{HOLDER_BYTES_MAX, default_holder};
use leasehold_core::record::Begin;

use crate::errors::{Answer, Refusal, code};
use crate::ledger::{self, NewRow};
use crate::resources::{self, Resource};
use crate::table::{self, Bytes, Database, Entry, Holding};
use crate::xact::{self, Checked};
use crate::{drain, errors, fence, pg, tokens};

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
}

/// The token, or None where the resource is held, being granted, or not drained yet.
pub fn acquire(request: &Request) -> Answer<Option<i64>> {
    let resource = &request.resource;
    // the common refusal first: it takes a shared lock and nothing else
    let is_live = |entry: &Entry| entry.record.is_live(pg::clock::now_us());
    let mut known = table::read(resource.key(), is_live);
    if known == Some(true) {
        return Ok(None);
    }
    let database = resources::database(resource.ledger)?;
    if pg::clock::now_us() < database.grace_until_us {
        return Ok(None);
    }
    let over_us = loop {
        if known.is_none() && is_live(&resource.open(&database)?) {
            return Ok(None);
        }
        if !database.has_tokens() {
            tokens::ensure(resource.ledger)?;
        }
        match begin(request) {
            Some((Begin::Begun, over_us)) => break over_us,
            Some((Begin::InProgress, _)) if end_overdue(resource)? => {}
            Some(_) => return Ok(None),
            // the entry was reclaimed in between, by others that need room
            None => known = None,
        }
    };
    let Some(granted) = take_over(request, &database, over_us)? else {
        return Ok(None);
    };
    if !database.is_home {
        tokens::move_in(&database)?;
    }
    if request.durable {
        tokens::note_ttl(&database, request.ttl_us)?;
        make_durable(request, &granted)?;
        xact::grant_needs_the_disk();
    } else {
        write_for_memory(request, &granted, &database)?;
    }
    if pg::snapshot_is_fixed() {
        xact::grant_stands_alone();
    }
    Ok(Some(granted.token))
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

/// Puts the grant in progress, so that nobody else begins one; noted first, so that an error undoes
/// it. Whatever the outcome, a lease that is over is closed to further transactions. With it, since when
/// the last lease is over.
fn begin(request: &Request) -> Option<(Begin, i64)> {
    let resource = &request.resource;
    xact::prepare_grant();
    let noted = resource.clone();
    let (owner, now_us) = (xact::owner(), pg::clock::now_us());
    let begun = table::change(resource.key(), |entry| {
        let over_us = entry.record.over_since_us(now_us).unwrap_or(now_us);
        (entry.record.begin(owner, now_us), over_us)
    });
    if matches!(begun, Some((Begin::Begun, _))) {
        xact::grant_begun(noted);
    }
    begun
}

/// Whether a grant in progress was one whose transaction is open for longer than its lease, and is gone now.
fn end_overdue(resource: &Resource) -> Answer<bool> {
    let now_us = pg::clock::now_us();
    let overdue = table::change(resource.key(), |entry| entry.record.want_overdue(now_us));
    match overdue.flatten() {
        Some((owner, _)) if owner == xact::owner() => Ok(false),
        Some((owner, over_us)) => drain::drain_grant(resource, owner, over_us),
        None => Ok(false),
    }
}

struct Granted {
    token: i64,
    /// The ledger has a row of an older lease that is not marked released.
    row_open: bool,
    /// So far the WAL must be kept for a lease in memory to rely on a row that is marked, or gone.
    marked_lsn: u64,
    holding: Holding,
}

/// Drains: takes the fence for the moment in which the grant is recorded, and stays inside it.
fn take_over(request: &Request, database: &Database, over_us: i64) -> Answer<Option<Granted>> {
    let resource = &request.resource;
    // this transaction may itself have written under an older token
    let own_old = xact::checked(resource.hash, &resource.name, |_| ()).is_some();
    if own_old || !drain::drain(resource, over_us)? {
        table::change(resource.key(), |entry| entry.record.abort(xact::owner()));
        xact::grant_abandoned();
        return Ok(None);
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
        if let Some(granted) = record(request, database, &holding)? {
            break granted;
        }
        tokens::ensure(resource.ledger)?;
    };
    if !is_lone {
        pg::heavy::readmit_fence(resource.hash);
    }
    xact::grant_recorded(granted.token);
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
    Ok(Some(granted))
}

/// Records the grant under the next token, or None when the block of tokens is used up.
fn record(request: &Request, database: &Database, holding: &Holding) -> Answer<Option<Granted>> {
    let resource = &request.resource;
    let owner = xact::owner();
    let recorded = table::change(resource.key(), |entry| {
        let Some((token, marked_lsn)) = database.take_token() else {
            return Ok(None);
        };
        let now_us = pg::clock::now_us();
        let row_open = entry.record.row_open;
        if !entry
            .record
            .grant(owner, token, request.ttl_us, request.durable, now_us)
        {
            return Err((token, entry.record.t_max));
        }
        entry.holding = *holding;
        Ok(Some(Granted {
            token,
            row_open,
            marked_lsn,
            holding: *holding,
        }))
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
        None => own_label(pid),
    };
    Holding {
        holder: label,
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

fn make_durable(request: &Request, granted: &Granted) -> Answer<()> {
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
    )?;
    if !written {
        return Err(token_behind(resource, granted.token, i64::MAX));
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
