//! The SQL functions: they check arguments and context, call, and shape the answer.

use leasehold_core::name;
use leasehold_core::record::{End, Lasting, Release, State};
use leasehold_core::ttl::{self, TtlError};

use crate::acquire::{self, Request};
use crate::errors::{self, Answer, Refusal, code};
use crate::fence::{self, Presented};
use crate::pg::fmgr::{Call, Value};
use crate::pg::srf::{Field, Rows};
use crate::resources::{self, Resource};
use crate::table::{self, Database, Entry};
use crate::{ledger, pg, settings, sql_function, tokens, xact};

sql_function!(
    leasehold_acquire_lease,
    pg_finfo_leasehold_acquire_lease,
    acquire_lease
);
sql_function!(
    leasehold_renew_lease,
    pg_finfo_leasehold_renew_lease,
    renew_lease
);
sql_function!(
    leasehold_release_lease,
    pg_finfo_leasehold_release_lease,
    release_lease
);
sql_function!(leasehold_fence, pg_finfo_leasehold_fence, fence);
sql_function!(
    leasehold_check_fence,
    pg_finfo_leasehold_check_fence,
    check_fence
);
sql_function!(
    leasehold_lease_info,
    pg_finfo_leasehold_lease_info,
    lease_info
);
sql_function!(
    leasehold_all_leases,
    pg_finfo_leasehold_all_leases,
    all_leases
);
sql_function!(leasehold_home, pg_finfo_leasehold_home, home);

/// Every call starts here: without the shared table there is nothing to ask, and a parallel worker must
/// not. 55000, 25000.
pub fn check_preloaded() -> Answer<()> {
    if !table::is_ready() {
        return Err(errors::not_preloaded(&preload_line()));
    }
    if pg::is_parallel() {
        return Err(errors::in_parallel());
    }
    Ok(())
}

/// The exact line for postgresql.conf: what is preloaded now, and leasehold.
pub fn preload_line() -> String {
    let now = pg::shared_preload_libraries();
    if now.trim().is_empty() {
        "shared_preload_libraries = 'leasehold'".to_owned()
    } else {
        format!("shared_preload_libraries = '{},leasehold'", now.trim())
    }
}

/// acquire_lease(resource text, holder text, ttl interval) RETURNS bigint
fn acquire_lease(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let request = Request {
        resource: Resource::named(call.bytes(0))?,
        holder: checked_holder(call.bytes(1))?,
        ttl_us: checked_ttl(call.interval(2))?,
        durable: settings::is_durable(),
    };
    acquire::check_context()?;
    let token = acquire::acquire(&request)?;
    Ok(token.map_or(Value::Null, Value::I64))
}

fn checked_holder(holder: Option<Vec<u8>>) -> Answer<Option<Vec<u8>>> {
    match holder {
        Some(label) if label.is_empty() => Err(errors::empty_name("holder")),
        Some(label) if label.len() > name::HOLDER_BYTES_MAX => {
            Err(errors::holder_too_long(label.len()))
        }
        holder => Ok(holder),
    }
}

fn checked_ttl(interval: Option<(i32, i32, i64)>) -> Answer<i64> {
    let Some((months, days, us)) = interval else {
        return Ok(settings::default_ttl_us());
    };
    let max_us = settings::max_ttl_us();
    let ttl_us = ttl::interval_us(months, days, us);
    ttl::check(ttl_us, max_us).map_err(|error| match error {
        TtlError::NotPositive => Refusal::new(code::INVALID_PARAMETER, "ttl must be positive")
            .detail(format!("The ttl is {ttl_us} microseconds."))
            .hint("Pass an interval such as '30 seconds'."),
        TtlError::AboveMax => Refusal::new(
            code::INVALID_PARAMETER,
            "ttl is above leasehold.max_ttl",
        )
        .detail(format!(
            "The ttl is {} s (a month counts 30 days, a day 24 hours); leasehold.max_ttl is {} s.",
            ttl_us as f64 / 1e6,
            errors::seconds(max_us).trim_end_matches(" s")
        ))
        .hint("Use a shorter ttl and renew the lease, or raise leasehold.max_ttl."),
    })
}

fn checked_token(token: Option<i64>) -> Answer<i64> {
    match token {
        None => Err(errors::null_argument("token")),
        Some(token) if token <= 0 => Err(errors::token_not_positive(token)),
        Some(token) => Ok(token),
    }
}

/// renew_lease(resource text, token bigint, ttl interval) RETURNS boolean
fn renew_lease(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.bytes(0))?;
    let token = checked_token(call.i64(1))?;
    let ttl_us = checked_ttl(call.interval(2))?;
    if pg::in_recovery() {
        return Err(errors::on_standby("renew_lease()"));
    }
    let Some(entry) = own_lease(&resource, token, "renew")? else {
        return Ok(Value::Bool(false));
    };
    let owner = xact::owner();
    let Some(lasting) = entry.record.lasting(owner, token, pg::clock::now_us()) else {
        return Ok(Value::Bool(false));
    };
    if !remember(&resource, token, ttl_us, lasting)? {
        return Ok(Value::Bool(false));
    }
    let wall_clock = pg::wall_clock();
    let renewed = table::change(resource.key(), |entry| {
        let renewed = entry
            .record
            .renew(owner, token, ttl_us, pg::clock::now_us());
        if renewed {
            entry.holding.renewed_at = wall_clock;
        }
        renewed
    });
    Ok(Value::Bool(renewed.unwrap_or(false)))
}

/// Makes a TTL that is longer than the ledger knows durable before it counts: of this lease, or of all
/// that are in memory. False where the lease is over.
fn remember(resource: &Resource, token: i64, ttl_us: i64, lasting: Lasting) -> Answer<bool> {
    let is_known = if lasting.durable {
        ttl_us <= lasting.ttl_us
    } else {
        ttl_us <= resources::database(resource.ledger)?.memory_ttl_us
    };
    if is_known {
        return Ok(true);
    }
    if pg::read_only_transaction() {
        return Err(errors::read_only(
            "renew_lease()",
            "The ttl is longer than the ledger knows, so it would have to be written there.",
        ));
    }
    if lasting.durable {
        tokens::note_ttl(&resources::database(resource.ledger)?, ttl_us)?;
        // false where a taker has overwritten the row meanwhile
        let is_written = ledger::lengthen(resource.ledger, &resource.name, token, ttl_us)?;
        if is_written {
            xact::lengthened(resource, token, ttl_us);
        }
        return Ok(is_written);
    }
    tokens::raise_memory_ttl(resource.ledger, ttl_us)?;
    xact::lengthened(resource, token, ttl_us);
    Ok(true)
}

/// The entry of a resource, if it is in the table (or can be) and `token` is its last one. 42501 when
/// the lease is another role's.
fn own_lease(resource: &Resource, token: i64, to: &str) -> Answer<Option<Entry>> {
    let known = table::read(resource.key(), |entry| *entry);
    let entry = match known {
        Some(entry) => entry,
        None => {
            let database = resources::database(resource.ledger)?;
            match resource.find(&database)? {
                resources::Found::Nowhere => return Ok(None),
                _ => resource.open(&database)?,
            }
        }
    };
    if entry.record.t_max != token || entry.record.lease.end == End::Lost {
        return Ok(None);
    }
    let now_us = pg::clock::now_us();
    let is_over = entry.record.release_answer(xact::owner(), token, now_us) == Release::No;
    if entry.record.lease.token == token && !is_over {
        fence::check_role(resource, entry.holding.role, to)?;
    }
    Ok(Some(entry))
}

/// release_lease(resource text, token bigint) RETURNS boolean
fn release_lease(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.bytes(0))?;
    let token = checked_token(call.i64(1))?;
    if pg::in_recovery() {
        return Err(errors::on_standby("release_lease()"));
    }
    let Some(entry) = own_lease(&resource, token, "release")? else {
        return Ok(Value::Bool(false));
    };
    let answer = entry
        .record
        .release_answer(xact::owner(), token, pg::clock::now_us());
    Ok(Value::Bool(match answer {
        Release::Yes => {
            xact::release_at_commit(&resource, token);
            true
        }
        Release::Already => true,
        Release::No => false,
    }))
}

/// fence(resource text, token bigint) RETURNS void
fn fence(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.bytes(0))?;
    let token = checked_token(call.i64(1))?;
    if pg::in_recovery() {
        return Err(errors::on_standby("fence()"));
    }
    let presented = Presented {
        tokens: &[token],
        named: true,
        strict: false,
    };
    fence::pass(&resource, presented)?;
    Ok(Value::Void)
}

/// check_fence(resource text, token bigint) RETURNS boolean
fn check_fence(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.bytes(0))?;
    let token = checked_token(call.i64(1))?;
    let good = if pg::in_recovery() {
        let row = ledger::read(resource.ledger, &resource.name)?;
        row.is_some_and(|row| {
            row.token == token
                && resources::replicated(&row)
                    .record
                    .is_live(pg::clock::now_us())
        })
    } else if fence::holds(&resource, token) {
        true
    } else {
        let database = resources::database(resource.ledger)?;
        fence::would_pass(&resource, &database, token)?
    };
    Ok(Value::Bool(good))
}

/// lease_info(resource text) RETURNS TABLE of one row
fn lease_info(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.bytes(0))?;
    let database = primary_database(resource.ledger)?;
    let found = resource.peek(database.as_ref())?;
    let mut rows = Rows::start(call);
    let found = found.as_ref().map(|(entry, _)| entry);
    push_lease(
        &mut rows,
        &resource.name,
        resource.hash,
        found,
        database.as_ref(),
    );
    Ok(Value::Void)
}

/// leasehold.all_leases() RETURNS TABLE: what the view leasehold.leases shows
fn all_leases(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let ledger = ledger::oid()?;
    let database = primary_database(ledger)?;
    // the ledger first: what is brought into the table meanwhile is then seen in either
    let durable = ledger::unreleased(ledger)?;
    let shared = match database {
        Some(_) => table::entries(pg::database(), ledger),
        None => Vec::new(),
    };
    let seen: std::collections::HashSet<&[u8]> =
        shared.iter().map(|(name, _)| name.as_slice()).collect();
    let mut rows = Rows::start(call);
    let now_us = pg::clock::now_us();
    for (name, entry) in &shared {
        if entry.record.state(now_us) != State::Free {
            let hash = name::hash(name.as_slice());
            let name = name.as_slice();
            push_lease(&mut rows, name, hash, Some(entry), database.as_ref());
        }
    }
    for (name, row) in durable
        .iter()
        .filter(|(name, _)| !seen.contains(name.as_slice()))
    {
        let entry = match &database {
            // granted since the start and gone from the table: it is over
            Some(database) if row.token > database.floor => continue,
            Some(database) => resources::recovered(row, database),
            None => resources::replicated(row),
        };
        if entry.record.state(now_us) != State::Free {
            let hash = name::hash(name);
            push_lease(&mut rows, name, hash, Some(&entry), database.as_ref());
        }
    }
    Ok(Value::Void)
}

/// None on a standby.
fn primary_database(ledger: pg::Oid) -> Answer<Option<Database>> {
    if pg::in_recovery() {
        return Ok(None);
    }
    resources::database(ledger).map(Some)
}

/// resource, token, holder, state, ttl, remaining, granted_at, renewed_at, role, pid, durable, writers
fn push_lease(
    rows: &mut Rows,
    name: &[u8],
    hash: u64,
    found: Option<&Entry>,
    database: Option<&Database>,
) {
    let now_us = pg::clock::now_us();
    let writers = database.map_or(0, |_| pg::heavy::writers(hash));
    let state = found.map_or(State::Free, |entry| entry.record.state(now_us));
    let grace_us = database.map_or(0, |database| database.grace_until_us.saturating_sub(now_us));
    let shown = shown_state(state, found, grace_us, writers);
    let Some(entry) = found.filter(|_| state != State::Free) else {
        rows.push(&[
            Field::Text(name),
            Field::Null,
            Field::Null,
            Field::Text(shown.as_bytes()),
            Field::Null,
            if grace_us > 0 {
                Field::Interval(grace_us)
            } else {
                Field::Null
            },
            Field::Null,
            Field::Null,
            Field::Null,
            Field::Null,
            Field::Null,
            Field::I32(writers),
        ]);
        return;
    };
    let record = &entry.record;
    let (ttl_us, deadline_us, durable) = if record.grant.token != 0 {
        let grant = &record.grant;
        (grant.ttl_us, grant.deadline_us, grant.durable)
    } else {
        let lease = &record.lease;
        (lease.ttl_us, lease.deadline_us, lease.durable)
    };
    let holding = &entry.holding;
    rows.push(&[
        Field::Text(name),
        Field::I64(record.t_max),
        Field::Text(holding.holder.as_slice()),
        Field::Text(shown.as_bytes()),
        Field::Interval(ttl_us),
        Field::Interval(deadline_us.saturating_sub(now_us).max(grace_us).max(0)),
        Field::Timestamp(holding.granted_at),
        optional(holding.renewed_at, Field::Timestamp),
        Field::Oid(holding.role),
        if holding.pid == 0 {
            Field::Null
        } else {
            Field::I32(holding.pid)
        },
        Field::Bool(durable),
        Field::I32(writers),
    ]);
}

fn optional<'a>(value: i64, field: fn(i64) -> Field<'a>) -> Field<'a> {
    if value == 0 {
        Field::Null
    } else {
        field(value)
    }
}

/// The state as it is called in SQL. `grace_us`: so long nothing is granted, for leases that the server does not
/// know may still be believed in.
fn shown_state(state: State, found: Option<&Entry>, grace_us: i64, writers: i32) -> &'static str {
    let is_wanted = found.is_some_and(|entry| entry.record.contested);
    let is_unseen = found.is_some_and(|entry| {
        let lease = &entry.record.lease;
        lease.recovered && lease.token == entry.record.t_max && entry.holding.renewed_at == 0
    });
    match state {
        State::Held if is_unseen => "recovering",
        State::Held => "held",
        _ if is_wanted && writers > 0 => "draining",
        _ if grace_us > 0 => "recovering",
        State::Free => "free",
        State::Expired => "expired",
    }
}

/// leasehold.home() RETURNS TABLE (system bigint, database oid, timeline bigint): this server
fn home(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let (system, database) = ledger::here();
    let mut rows = Rows::start(call);
    rows.push(&[
        Field::I64(system),
        Field::Oid(database),
        Field::I64(i64::from(pg::timeline())),
    ]);
    Ok(Value::Void)
}
