//! The tables that clients work on, and the shapes of a fenced write.
//!
//! `item` and `state` are fenced, each row by its resource. `log` and `counter` are not: in the transaction of each
//! fenced write, and after it, the counter of its resource goes up by one and the log says under which number, token,
//! id and shape it was written. The counter's row lock is kept until the transaction ends, so the numbers of a resource
//! are in the order of its commits, by no clock.

use super::event::{Lease, Resource, name};
use super::rng::Rng;

/// Resources that clients contend for. Fewer than clients, so that takers come while holders stall.
pub const CONTENDED: usize = 4;
/// Resources that are leased for a moment only: they push the others out of a small shared table.
pub const FLEETING: usize = 60;

pub fn tables() -> String {
    let mut sql = "
        CREATE TABLE item (resource text NOT NULL, id bigint NOT NULL, token bigint);
        CREATE TABLE state (resource text PRIMARY KEY, n bigint NOT NULL, id bigint NOT NULL, token bigint);
        CREATE TABLE counter (resource text PRIMARY KEY, seq bigint NOT NULL);
        CREATE TABLE log (resource text NOT NULL, seq bigint NOT NULL, token bigint NOT NULL, id bigint NOT NULL,
            shape text NOT NULL);
        CREATE INDEX ON item (resource);"
        .to_owned();
    for resource in (0..CONTENDED).map(name) {
        sql += &format!(
            "INSERT INTO counter VALUES ('{resource}', 0); INSERT INTO state VALUES ('{resource}', 0, 0);"
        );
    }
    // after the rows: they have no token
    sql + "SELECT fence_table('item', '{resource}', 'token'); SELECT fence_table('state', '{resource}', 'token');"
}

/// How a write presents its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The transaction has acquired the lease itself.
    Own,
    Fence,
    Setting,
    Column,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Insert,
    Copy,
    Delete,
    Update,
    Upsert,
    Merge,
}

impl Shape {
    const ALL: [Self; 6] = [
        Self::Insert,
        Self::Copy,
        Self::Delete,
        Self::Update,
        Self::Upsert,
        Self::Merge,
    ];

    pub fn random(rng: &mut Rng) -> Self {
        Self::ALL[rng.below(Self::ALL.len() as u64) as usize]
    }

    /// An unchanged column presents nothing: a DELETE has no other, and a MERGE sets none here.
    pub fn takes_column(self) -> bool {
        !matches!(self, Self::Delete | Self::Merge)
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Copy => "copy",
            Self::Delete => "delete",
            Self::Update => "update",
            Self::Upsert => "upsert",
            Self::Merge => "merge",
        }
    }

    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| shape.word() == word)
    }

    /// The statement; a COPY takes `copied` as its data. `column` is the token where the row presents it, or NULL.
    pub fn sql(self, resource: Resource, id: i64, column: Option<i64>) -> String {
        let (r, token) = (name(resource), number_or_null(column));
        match self {
            Self::Insert => format!("INSERT INTO item VALUES ('{r}', {id}, {token})"),
            Self::Copy => "COPY item FROM STDIN".to_owned(),
            Self::Delete => format!("DELETE FROM item WHERE resource = '{r}' RETURNING id"),
            Self::Update => {
                let sets = column.map_or(String::new(), |token| format!(", token = {token}"));
                format!("UPDATE state SET n = n + 1, id = {id}{sets} WHERE resource = '{r}'")
            }
            Self::Upsert => format!(
                "INSERT INTO state VALUES ('{r}', 1, {id}, {token})
                 ON CONFLICT (resource) DO UPDATE SET n = state.n + 1, id = EXCLUDED.id, token = EXCLUDED.token"
            ),
            Self::Merge => format!(
                "MERGE INTO state USING (VALUES ('{r}', {id})) AS new (resource, id) ON state.resource = new.resource
                 WHEN MATCHED THEN UPDATE SET n = n + 1, id = new.id
                 WHEN NOT MATCHED THEN INSERT VALUES (new.resource, 1, new.id)"
            ),
        }
    }

    pub fn copied(resource: Resource, id: i64, column: Option<i64>) -> String {
        let token = column.map_or("\\N".to_owned(), |token| token.to_string());
        format!("{}\t{id}\t{token}\n", name(resource))
    }
}

/// Numbers a write; its answer is the number.
pub fn count(lease: Lease, id: i64, shape: Shape) -> String {
    let (r, token, word) = (name(lease.resource), lease.token, shape.word());
    format!(
        "WITH next AS (UPDATE counter SET seq = seq + 1 WHERE resource = '{r}' RETURNING seq)
         INSERT INTO log SELECT '{r}', seq, {token}, {id}, '{word}' FROM next RETURNING seq"
    )
}

fn number_or_null(number: Option<i64>) -> String {
    number.map_or("NULL".to_owned(), |number| number.to_string())
}
