//! The fence: whether a presented token is good for a resource, held good until the transaction ends.
//!
//! 1. Look without a lock. A token that is refused now is refused, and has locked nobody out.
//! 2. Take the fence lock in share mode: from here no grant can be recorded.
//! 3. Look again. What is good now stays good until the (sub)transaction ends, so it is remembered and
//!    the next row costs a comparison.

use leasehold_core::record::{Over, Verdict};

use crate::errors::{self, Answer, Refusal, code, seconds};
use crate::events::RefusedWrite;
use crate::resources::Resource;
use crate::stats::{self, Count};
use crate::table::{Database, Entry};
use crate::xact::{self, Checked};
use crate::{pg, resources, rights};

/// What a transaction presents for a resource.
#[derive(Clone, Copy)]
pub struct Presented<'a> {
    /// One token, or the bare ones of the setting.
    pub tokens: &'a [i64],
    /// By an own acquire or `fence()`: for this resource by name.
    pub named: bool,
    /// An expired lease is over even if nobody wants the resource.
    pub strict: bool,
}

/// Checks what is presented and holds the verdict. LH001, LH002, LH004, 42501. The token that is good.
///
/// A verdict that this transaction holds already stays good, whoever wants the resource meanwhile; only
/// another user is asked for his role.
pub fn pass(resource: &Resource, presented: Presented) -> Answer<i64> {
    let held = xact::checked(resource.hash, &resource.name, Clone::clone);
    if let Some(held) = held.filter(|held| presented.tokens.contains(&held.token)) {
        let in_time = !presented.strict || pg::clock::now_us() < held.deadline_us;
        if in_time && (held.named || !presented.named) {
            if let Some(role) = held.role {
                check_role(resource, role, "write under")?;
            }
            xact::note_users(resource.hash, users());
            return Ok(held.token);
        }
    }
    let database = resources::database(resource.ledger)?;
    stats::count(Count::FenceChecks);
    judge(resource, &database, presented)?;
    pg::heavy::share_fence(resource.hash);
    let (token, deadline_us, role) = judge(resource, &database, presented)?;
    xact::note_checked(
        resource.hash,
        Checked {
            resource: resource.name.clone(),
            token,
            deadline_us,
            named: presented.named,
            role,
            users: users(),
        },
    );
    Ok(token)
}

/// Whether this transaction holds a verdict on this token.
pub fn holds(resource: &Resource, token: i64) -> bool {
    xact::checked(resource.hash, &resource.name, |held| held.token == token) == Some(true)
}

/// The users whose membership counts.
pub fn users() -> (pg::Oid, pg::Oid) {
    (pg::current_user(), pg::session_user())
}

/// Whether a verdict that holds still serves: the same users (or their membership is checked anew),
/// and for a strict check the lease has not expired.
pub fn still_good(checked: &Checked, strict: bool) -> bool {
    checked.users == users() && (!strict || pg::clock::now_us() < checked.deadline_us)
}

/// The verdict as it is now: the good token, its deadline, and the role whose members may use it.
fn judge(
    resource: &Resource,
    database: &Database,
    presented: Presented,
) -> Answer<(i64, i64, Option<pg::Oid>)> {
    let entry = resource.find(database)?.entry();
    let now_us = pg::clock::now_us();
    let record = &entry.record;
    let verdict = record.verdict(
        presented.tokens,
        xact::owner(),
        database.stale_floor(),
        presented.strict,
        now_us,
    );
    match verdict {
        Verdict::Good { token, deadline_us } => {
            if record.grant.token == token {
                // this transaction's own grant is good for whatever role it takes on
                return Ok((token, deadline_us, None));
            }
            check_role(resource, entry.holding.role, "write under")?;
            check_sight(resource, &entry)?;
            Ok((token, deadline_us, Some(entry.holding.role)))
        }
        Verdict::Stale => Err(stale(resource, presented.tokens, &entry)),
        Verdict::Unknown => Err(unknown(resource, presented.tokens, &entry)),
        Verdict::Over(over) => Err(lease_over(resource, over, presented.strict, &entry, now_us)),
    }
}

/// What `pass` would say, without a lock, without looking at roles, and without a place in the table.
pub fn would_pass(resource: &Resource, database: &Database, token: i64) -> Answer<bool> {
    let Some((entry, _)) = resource.peek(Some(database))? else {
        return Ok(false);
    };
    let verdict = entry.record.verdict(
        &[token],
        xact::owner(),
        database.stale_floor(),
        false,
        pg::clock::now_us(),
    );
    Ok(matches!(verdict, Verdict::Good { .. }))
}

/// A transaction whose snapshot is older than the grant could not see what earlier holders wrote.
/// 40001, as for any other row that such a transaction comes too late for: run it again.
fn check_sight(resource: &Resource, entry: &Entry) -> Answer<()> {
    let holding = &entry.holding;
    let predates = if holding.granted_by != 0 {
        pg::fixed_snapshot_predates(holding.granted_by)
    } else {
        holding.granted_after != 0 && pg::fixed_snapshot_predates_all_below(holding.granted_after)
    };
    if !predates {
        return Ok(());
    }
    Err(Refusal::new(
        code::SERIALIZATION_FAILURE,
        "could not serialize access due to a lease that was granted meanwhile",
    )
    .detail(format!(
        "The snapshot of this transaction is older than the grant of resource \"{}\" under token {}, so it could not see what earlier holders wrote.",
        resource.shown(),
        entry.record.t_max
    ))
    .hint("Run the transaction again."))
}

/// A lease may be used by members of its role: the current user's or the session user's. 42501.
pub fn check_role(resource: &Resource, role: pg::Oid, to: &str) -> Answer<()> {
    if pg::is_member(pg::current_user(), role) || pg::is_member(pg::session_user(), role) {
        return Ok(());
    }
    let owner = pg::role_name(role);
    Err(Refusal::new(
        code::INSUFFICIENT_PRIVILEGE,
        format!("permission denied to {to} the lease on resource \"{}\"", resource.shown()),
    )
    .detail(format!(
        "The lease belongs to role \"{owner}\"; neither \"{}\" nor the session user \"{}\" is a member of it.",
        pg::role_name(pg::current_user()),
        pg::role_name(pg::session_user())
    ))
    .hint(format!(
        "Use a role that is a member of \"{owner}\"."
    )))
}

/// What the flight recorder says of it: the resource's token, and the first of those that were presented.
fn about(resource: &Resource, tokens: &[i64], entry: Option<&Entry>) -> RefusedWrite {
    let presented = tokens.first().copied().unwrap_or_default();
    RefusedWrite::of(resource.ledger, &resource.name, presented, entry)
}

fn list(tokens: &[i64]) -> String {
    let shown: Vec<String> = tokens.iter().map(i64::to_string).collect();
    match shown.as_slice() {
        [one] => format!("The presented token is {one}"),
        many => format!("The presented tokens are {}", many.join(", ")),
    }
}

/// The label of the holder for a message, if this role may see it.
fn holder(entry: &Entry) -> Option<String> {
    let holding = &entry.holding;
    let holder = holding.holder.as_slice();
    (!holder.is_empty() && rights::may_see(holding.role)).then(|| errors::shown(holder))
}

/// "; the current token is 41, granted to "b"", or what else there is to say.
fn current(entry: &Entry) -> String {
    let record = &entry.record;
    if record.t_max == 0 {
        return "; the resource has never been granted".to_owned();
    }
    match holder(entry) {
        None => format!("; the current token is {}", record.t_max),
        Some(holder) => format!(
            "; the current token is {}, granted to \"{holder}\"",
            record.t_max
        ),
    }
}

fn stale(resource: &Resource, tokens: &[i64], entry: &Entry) -> Refusal {
    let t_max = entry.record.t_max;
    let lost = "lost with a restart, a promotion or a copy of the database";
    let detail = if tokens.contains(&t_max) {
        format!("{}; its lease was {lost}.", list(tokens))
    } else if tokens.iter().all(|token| *token > t_max) {
        let current = current(entry);
        format!(
            "{}{current}. It was {lost}, or was never granted.",
            list(tokens)
        )
    } else {
        format!("{}{}.", list(tokens), current(entry))
    };
    Refusal::new(
        code::STALE_TOKEN,
        format!("stale token for resource \"{}\"", resource.shown()),
    )
    .about(about(resource, tokens, Some(entry)))
    .detail(detail)
    .hint("Roll back, acquire the resource again, and read before you write: others may have written since. A token is good for one resource only.")
}

fn unknown(resource: &Resource, tokens: &[i64], entry: &Entry) -> Refusal {
    let detail = if tokens.contains(&entry.record.t_max) {
        format!(
            "{}; its grant has not been committed, or was rolled back.",
            list(tokens)
        )
    } else {
        format!("{}{}.", list(tokens), current(entry))
    };
    Refusal::new(
        code::UNKNOWN_TOKEN,
        format!("unknown token for resource \"{}\"", resource.shown()),
    )
    .about(about(resource, tokens, Some(entry)))
    .detail(detail)
    .hint("Present the token that acquire_lease returned for this resource, after its transaction has committed; one that was rolled back is never valid.")
}

/// No token is presented for the resource. LH003.
pub fn no_token(resource: &Resource, relation: &str) -> Refusal {
    // it is counted where the database is known
    let _ = resources::database(resource.ledger);
    Refusal::new(
        code::NO_TOKEN,
        format!("no token presented for resource \"{}\"", resource.shown()),
    )
    .about(about(resource, &[], None))
    .detail(format!(
        "Table {relation} is fenced by the resource \"{}\".",
        resource.shown()
    ))
    .hint(format!(
        "Acquire the resource, then in the transaction that writes run: SELECT fence({}, <token>); or: SET LOCAL leasehold.token = '<token>';",
        errors::literal(&resource.name)
    ))
}

fn lease_over(
    resource: &Resource,
    over: Over,
    strict: bool,
    entry: &Entry,
    now_us: i64,
) -> Refusal {
    let token = entry.record.t_max;
    let token = match holder(entry) {
        None => format!("Token {token}"),
        Some(holder) => format!("Token {token} of holder \"{holder}\""),
    };
    let detail = match over {
        Over::Released => format!("{token} was released."),
        Over::Reclaimed => format!("{token} was released or has expired."),
        Over::Unconfirmed => format!(
            "{token} was not confirmed by the synchronous standby: the wait for it was cancelled."
        ),
        Over::Broken => format!("{token} was ended by an administrator."),
        Over::Expired => {
            let since = seconds(now_us.saturating_sub(entry.record.lease.deadline_us).max(0));
            let why = if strict {
                "this check is strict"
            } else {
                "another transaction wants the resource"
            };
            format!("{token} expired {since} ago, and {why}.")
        }
    };
    Refusal::new(
        code::LEASE_OVER,
        format!("the lease on resource \"{}\" is over", resource.shown()),
    )
    .about(about(resource, &[entry.record.t_max], Some(entry)))
    .detail(detail)
    .hint(match over {
        Over::Expired | Over::Reclaimed => "Roll back, and acquire the resource again before you write. Renew a lease before it expires.",
        _ => "Roll back, and acquire the resource again before you write.",
    })
}
