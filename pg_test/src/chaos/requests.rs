//! What is promised to who asks again: the same token while its lease lives, and not a moment longer.

use std::collections::HashMap;

use super::checker::{Fault, Index, Rule};
use super::clock::Micros;
use super::event::Lease;
use super::history::{Attempt, Fate, Grant, History, Outcome, Record};

pub fn faults(index: &Index) -> Vec<Fault> {
    let mut of_request: HashMap<i64, Vec<&Grant>> = HashMap::new();
    for grant in &index.history.grants {
        if let Some(request) = grant.request {
            of_request.entry(request).or_default().push(grant);
        }
    }
    let asked = index
        .history
        .attempts
        .iter()
        .filter(|a| a.request.is_some());
    asked
        .flat_map(|attempt| {
            let granted = attempt.request.and_then(|request| of_request.get(&request));
            [
                forgotten(index, attempt, granted.map_or(&[], Vec::as_slice)),
                revived(index, attempt),
            ]
        })
        .flatten()
        .collect()
}

/// Retries that were answered with a token that had been granted before they were sent: it had been told already, or a
/// higher one had been.
pub fn granted_before(history: &History) -> usize {
    let mut tokens: Vec<(Micros, i64)> = history
        .attempts
        .iter()
        .filter_map(|attempt| Some((attempt.answered, attempt.token()?)))
        .collect();
    tokens.sort_unstable();
    let mut highest = Vec::new();
    for (answered, token) in &tokens {
        let known = highest.last().map_or(0, |(_, token)| *token);
        highest.push((*answered, known.max(*token)));
    }
    let retries = history.attempts.iter().filter(|attempt| attempt.is_retry);
    let before = retries.filter(|retry| {
        let known = highest.partition_point(|(answered, _)| *answered < retry.asked);
        let highest = known.checked_sub(1).map_or(0, |last| highest[last].1);
        retry.token().is_some_and(|token| token <= highest)
    });
    before.count()
}

/// The request was granted a lease, the client knew it, and did not get it again though it may still believe in it.
fn forgotten(index: &Index, attempt: &Attempt, granted: &[&Grant]) -> Option<Fault> {
    if !matches!(
        attempt.outcome,
        Outcome::Token(_) | Outcome::Null | Outcome::Shed
    ) {
        return None;
    }
    let mut known = granted.iter().filter(|grant| {
        grant.committed < attempt.asked && attempt.token() != Some(grant.lease.token)
    });
    let mut piece = known.find_map(|grant| index.good(grant.lease, attempt.answered))?;
    piece.push(Record::Attempt(*attempt));
    Some(Fault::new(Rule::RetryForgot, piece))
}

/// A token that was answered once more after its lease was over for sure. A crash may forget a release, and a restart
/// counts the TTL anew.
fn revived(index: &Index, attempt: &Attempt) -> Option<Fault> {
    let token = attempt.token()?;
    let (asked, answered) = (attempt.asked, attempt.answered);
    let committed = |fate: Fate| fate == Fate::Committed;
    let lost = |at: Micros| index.end.blows.iter().any(|blow| blow.may_lose(at));
    let lease = Lease {
        resource: attempt.resource,
        token,
    };
    let release = index.released.get(&token).filter(|release| {
        committed(release.fate) && release.answered < asked && !index.struck(release.from, answered)
    });
    let broken = index.broken.get(&token).filter(|broken| {
        committed(broken.fate) && broken.answered < asked && !lost(broken.answered)
    });
    let why = release
        .map(|release| Record::Release(**release))
        .or_else(|| broken.map(|broken| Record::Break(**broken)))
        .or_else(|| {
            index
                .newer(lease, asked, answered)
                .map(|grant| Record::Grant(*grant))
        })
        .or_else(|| {
            let grant = index.by_token.get(&token)?;
            let over = last_end(index.history, grant) < asked;
            (over && !index.struck(grant.asked, answered)).then_some(Record::Grant(**grant))
        })?;
    Some(Fault::new(
        Rule::RetryRevived,
        vec![why, Record::Attempt(*attempt)],
    ))
}

/// When a lease has run out at the latest, unless the server was restarted.
fn last_end(history: &History, grant: &Grant) -> Micros {
    let token = grant.lease.token;
    let mut unheard = history.unheard_renewals.iter();
    if grant.fate != Fate::Committed || unheard.any(|(renewed, _)| *renewed == token) {
        return Micros::MAX;
    }
    let renewals = history.renewals.iter();
    renewals
        .filter(|renewal| renewal.renewed && renewal.lease.token == token)
        .map(|renewal| renewal.answered + renewal.ttl)
        .fold(grant.committed.saturating_add(grant.ttl), Micros::max)
}
