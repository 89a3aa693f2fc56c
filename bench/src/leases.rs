//! The leases that a run stands on, and the question whether they are as they should be after it.

use postgres::Client;

use crate::Result;

/// Takes fresh leases on `resources` and nothing else. Their tokens are consecutive; the answer is the first.
pub fn take(client: &mut Client, resources: &[String], ttl: &str) -> Result<i64> {
    client.execute(
        "SELECT release_lease(resource, token) FROM leasehold.leases WHERE state = 'held'",
        &[],
    )?;
    let mut tokens = Vec::new();
    for resource in resources {
        let row = client.query_one(
            "SELECT acquire_lease($1, ttl => $2::text::interval)",
            &[resource, &ttl],
        )?;
        tokens.push(row.try_get::<_, i64>(0)?);
    }
    let first = *tokens.first().ok_or("no resource")?;
    if tokens
        .iter()
        .zip(first..)
        .any(|(token, expected)| *token != expected)
    {
        return Err(format!("tokens are not consecutive: {tokens:?}").into());
    }
    Ok(first)
}

/// A run of calls that did not do their work is no figure.
pub fn expect_held(client: &mut Client, condition: &str, expected: i64) -> Result<()> {
    let sql =
        format!("SELECT count(*) FROM leasehold.leases WHERE state = 'held' AND ({condition})");
    let found: i64 = client.query_one(&sql, &[])?.get(0);
    if found != expected {
        return Err(format!(
            "after the run {found} leases are held where {condition}, not {expected}"
        )
        .into());
    }
    Ok(())
}
