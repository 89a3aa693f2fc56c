//! Which roles may acquire which resources, and how many leases a role may hold.
//!
//! - A rule allows a role a resource by name, or all that begin with a prefix. The rules that match a name most
//!   closely decide: those of the name itself, or else those of the longest prefix. Where none matches anyone may.
//! - Rules are read once by each backend, and again when `allow_lease` or `disallow_lease` has changed them, or a
//!   role was changed: they say so to PostgreSQL's cache, which tells all backends with the commit. A rule of a
//!   role that is gone is none.
//! - The quota counts leases that are live, and grants in progress, of the current role in this database. The shared
//!   table keeps a number that is never too low (`table::held_at_most`); only where that reaches the quota it is
//!   counted exactly.

use std::cell::{Cell, RefCell};

use leasehold_core::rights::Pattern;

use crate::errors::{self, Answer, Refusal, code};
use crate::pg::fmgr::{Call, Value};
use crate::pg::{self, Oid, heavy};
use crate::resources::Resource;
use crate::{api, ledger, settings, sql_function, table};

sql_function!(
    leasehold_allow_lease,
    pg_finfo_leasehold_allow_lease,
    allow_lease
);
sql_function!(
    leasehold_disallow_lease,
    pg_finfo_leasehold_disallow_lease,
    disallow_lease
);

thread_local! {
    /// Counts how often the rules of this database may have changed.
    static CHANGES: Cell<u64> = const { Cell::new(1) };
    /// The rules, as of that number of changes.
    static RULES: RefCell<(u64, Vec<Rule>)> = const { RefCell::new((0, Vec::new())) };
}

struct Rule {
    pattern: Pattern,
    /// As it was given.
    text: Vec<u8>,
    role: Oid,
}

/// The rules may have changed. Neither raises nor allocates.
pub fn rules_changed() {
    CHANGES.set(CHANGES.get().wrapping_add(1));
}

/// 42501 where others are allowed the resource, and the current role is a member of none of them.
pub fn check(resource: &Resource) -> Answer<()> {
    pg::take_note_of_changes();
    // what changes while they are read may not be among them
    while RULES.with_borrow(|(changes, _)| *changes) != CHANGES.get() {
        pg::hooks::watch_catalogs();
        let changes = CHANGES.get();
        let rules = ledger::rules(resource.ledger)?
            .into_iter()
            .filter_map(|(text, role)| {
                let pattern = Pattern::parse(&text).ok()?;
                Some(Rule {
                    pattern,
                    text,
                    role,
                })
            })
            .collect();
        RULES.set((changes, rules));
    }
    let deciding: Vec<(Oid, Vec<u8>)> = RULES.with_borrow(|(_, rules)| {
        let matching = || {
            let rules = rules.iter();
            rules.filter(|rule| rule.pattern.matches(&resource.name))
        };
        let closest = matching().map(|rule| rule.pattern.closeness()).max();
        let deciding = matching().filter(|rule| Some(rule.pattern.closeness()) == closest);
        deciding
            .map(|rule| (rule.role, rule.text.clone()))
            .collect()
    });
    let user = pg::current_user();
    let is_allowed = deciding.iter().any(|(role, _)| pg::is_member(user, *role));
    match deciding.first() {
        Some((_, pattern)) if !is_allowed => Err(not_allowed(resource, &deciding, pattern)),
        _ => Ok(()),
    }
}

fn not_allowed(resource: &Resource, deciding: &[(Oid, Vec<u8>)], pattern: &[u8]) -> Refusal {
    let user = pg::role_name(pg::current_user());
    let roles: Vec<String> = deciding
        .iter()
        .map(|(role, _)| format!("\"{}\"", pg::role_name(*role)))
        .collect();
    Refusal::new(
        code::INSUFFICIENT_PRIVILEGE,
        format!(
            "permission denied to acquire resource \"{}\"",
            resource.shown()
        ),
    )
    .detail(format!(
        "\"{}\" is allowed to {}, and role \"{user}\" is a member of none of them.",
        errors::shown(pattern),
        roles.join(", "),
    ))
    .hint(format!(
        "An administrator can: SELECT allow_lease({}, {});",
        errors::literal(pattern),
        errors::literal(&pg::quote_identifier(user.as_bytes()))
    ))
}

/// Whether the current role may see who holds a lease of that role, and what is kept with it.
pub fn may_see(role: Oid) -> bool {
    let user = pg::current_user();
    pg::is_member(user, pg::ROLE_READ_ALL_STATS) || pg::is_member(user, role)
}

/// 53400 where the current role holds as many leases as it may.
pub fn check_quota() -> Answer<()> {
    let quota = settings::max_leases_per_role();
    if quota == 0 {
        return Ok(());
    }
    let (database, role) = (pg::database(), pg::current_user());
    if table::held_at_most(database, role) < quota {
        return Ok(());
    }
    let held = table::held_by(database, ledger::oid()?, role, pg::clock::now_us());
    if held < quota {
        return Ok(());
    }
    Err(Refusal::new(
        code::CONFIGURATION_LIMIT_EXCEEDED,
        "too many leases of one role",
    )
    .detail(format!(
        "Role \"{}\" holds {held} leases; leasehold.max_leases_per_role is {quota}.",
        pg::role_name(role)
    ))
    .hint("Release leases that are not needed, or use shorter TTLs. An administrator can raise the setting."))
}

/// Runs `record`, which adds a lease to those of the current role, where the quota has room for it; nobody else of
/// that role comes in between.
pub fn within_quota<R>(record: impl FnOnce() -> Answer<R>) -> Answer<R> {
    if settings::max_leases_per_role() == 0 {
        return record();
    }
    let role = pg::current_user();
    heavy::lock_quota(role);
    let recorded = check_quota().and_then(|()| record());
    heavy::unlock_quota(role);
    recorded
}

/// allow_lease(resource text, to_role regrole) RETURNS void
fn allow_lease(call: &Call) -> Answer<Value> {
    let (pattern, role) = rule(call, "allow_lease()")?;
    let ledger = ledger::oid()?;
    ledger::allow(ledger, &pattern, role, pg::current_user(), pg::wall_clock())?;
    Ok(Value::Void)
}

/// disallow_lease(resource text, to_role regrole) RETURNS void
fn disallow_lease(call: &Call) -> Answer<Value> {
    let (pattern, role) = rule(call, "disallow_lease()")?;
    if !ledger::disallow(ledger::oid()?, &pattern, role)? {
        pg::notice(
            &format!(
                "resource \"{}\" was not allowed to role \"{}\", skipping",
                errors::shown(&pattern),
                pg::role_name(role)
            ),
            "A rule is taken away by the very text that it was made with.",
            "See: SELECT * FROM leasehold.rights;",
        );
    }
    Ok(Value::Void)
}

/// The arguments, where an administrator gave them. 22004, 22023, 22001, 25006, 42501, 42704.
fn rule(call: &Call, name: &str) -> Answer<(Vec<u8>, Oid)> {
    api::check_preloaded()?;
    let pattern = call
        .bytes(0)
        .ok_or_else(|| errors::null_argument("resource"))?;
    let role = call
        .oid(1)
        .ok_or_else(|| errors::null_argument("to_role"))?;
    if pattern.is_empty() {
        return Err(errors::empty_name("resource"));
    }
    if let Err(len) = Pattern::parse(&pattern) {
        return Err(errors::resource_too_long(len));
    }
    if pg::in_recovery() {
        return Err(errors::on_standby(name));
    }
    if pg::read_only_transaction() {
        return Err(errors::read_only(name, "Rights are kept in a table."));
    }
    api::check_administrator("say who may acquire a resource")?;
    if !pg::role_exists(role) {
        return Err(Refusal::new(
            code::UNDEFINED_OBJECT,
            format!("role {role} does not exist"),
        )
        .detail("The argument \"to_role\" names no role.")
        .hint("Pass the name of a role."));
    }
    Ok((pattern, role))
}
