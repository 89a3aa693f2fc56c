//! Refusals: the errors that are ours, with SQLSTATE, DETAIL and HINT.
//!
//! A refusal is a value until the outermost frame raises it (`pg::fmgr`), because SQLSTATEs of class
//! `LH` are not in pgrx's closed list. Messages are lower case without a period; DETAIL and HINT are
//! sentences. Whoever returns a refusal has changed nothing.

use leasehold_core::name::{HOLDER_BYTES_MAX, RESOURCE_BYTES_MAX};

use crate::events::RefusedWrite;
use crate::pg;

/// SQLSTATEs. Those of class LH are part of the contract.
pub mod code {
    pub const STALE_TOKEN: &str = "LH001";
    pub const UNKNOWN_TOKEN: &str = "LH002";
    pub const NO_TOKEN: &str = "LH003";
    pub const LEASE_OVER: &str = "LH004";
    pub const SHED: &str = "LH005";
    pub const TABLE_FULL: &str = "LH006";
    pub const FEATURE_NOT_SUPPORTED: &str = "0A000";
    pub const DATA_TOO_LONG: &str = "22001";
    pub const NULL_NOT_ALLOWED: &str = "22004";
    pub const INVALID_PARAMETER: &str = "22023";
    pub const SEQUENCE_LIMIT: &str = "2200H";
    pub const ACTIVE_TRANSACTION: &str = "25001";
    pub const READ_ONLY_TRANSACTION: &str = "25006";
    pub const TRIGGER_PROTOCOL: &str = "39P01";
    pub const SERIALIZATION_FAILURE: &str = "40001";
    pub const INSUFFICIENT_PRIVILEGE: &str = "42501";
    pub const UNDEFINED_OBJECT: &str = "42704";
    pub const SYNTAX_ERROR: &str = "42601";
    pub const UNDEFINED_COLUMN: &str = "42703";
    pub const DATATYPE_MISMATCH: &str = "42804";
    pub const WRONG_OBJECT_TYPE: &str = "42809";
    pub const CONFIGURATION_LIMIT_EXCEEDED: &str = "53400";
    pub const LIMIT_EXCEEDED: &str = "54000";
    pub const INVALID_TRANSACTION_STATE: &str = "25000";
    pub const NOT_IN_PREREQUISITE_STATE: &str = "55000";
    pub const LOCK_NOT_AVAILABLE: &str = "55P03";
    pub const QUERY_CANCELED: &str = "57014";
    pub const ADMIN_SHUTDOWN: &str = "57P01";
    pub const INTERNAL: &str = "XX000";
}

/// An error that is raised once nothing is left to drop.
#[derive(Debug)]
pub struct Refusal {
    /// One of [`code`].
    pub sqlstate: &'static str,
    /// Lower case, no period.
    pub message: String,
    /// Sentences with the facts.
    pub detail: Option<String>,
    /// Sentences with the next step.
    pub hint: Option<String>,
    /// It ends the session.
    pub is_fatal: bool,
    /// The write that was refused, for the flight recorder.
    pub about: Option<Box<RefusedWrite>>,
}

/// A value, or a refusal.
pub type Answer<T> = Result<T, Refusal>;

impl Refusal {
    pub fn new(sqlstate: &'static str, message: impl Into<String>) -> Refusal {
        Refusal {
            sqlstate,
            message: message.into(),
            detail: None,
            hint: None,
            is_fatal: false,
            about: None,
        }
    }

    pub fn fatal(mut self) -> Refusal {
        self.is_fatal = true;
        self
    }

    pub fn about(mut self, write: RefusedWrite) -> Refusal {
        self.about = Some(Box::new(write));
        self
    }

    pub fn detail(mut self, detail: impl Into<String>) -> Refusal {
        self.detail = Some(detail.into());
        self
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Refusal {
        self.hint = Some(hint.into());
        self
    }
}

/// Bytes in the server's encoding, as text for a message.
pub fn shown(bytes: &[u8]) -> String {
    pg::encoding::to_utf8(bytes)
}

/// A resource or holder as an SQL literal, for a HINT that can be pasted.
pub fn literal(bytes: &[u8]) -> String {
    let text = shown(bytes).replace('\'', "''");
    if text.contains('\\') {
        format!("E'{}'", text.replace('\\', "\\\\"))
    } else {
        format!("'{text}'")
    }
}

/// Microseconds as seconds, for a message.
pub fn seconds(us: i64) -> String {
    format!("{}.{:03} s", us / 1_000_000, (us % 1_000_000).abs() / 1000)
}

/// An argument that must not be NULL.
pub fn null_argument(name: &str) -> Refusal {
    Refusal::new(code::NULL_NOT_ALLOWED, format!("{name} must not be NULL"))
        .detail(format!(
            "The argument \"{name}\" has no meaning without a value."
        ))
        .hint(format!("Pass a value for \"{name}\"."))
}

/// A name that is empty.
pub fn empty_name(what: &str) -> Refusal {
    Refusal::new(code::INVALID_PARAMETER, format!("{what} must not be empty"))
        .detail(format!("The {what} is a text of zero bytes."))
        .hint(format!("Pass a {what} of at least one byte."))
}

/// A resource over 255 bytes.
pub fn resource_too_long(len: usize) -> Refusal {
    too_long("resource", len, RESOURCE_BYTES_MAX)
}

/// A holder over 127 bytes.
pub fn holder_too_long(len: usize) -> Refusal {
    too_long("holder", len, HOLDER_BYTES_MAX)
}

fn too_long(what: &str, len: usize, max: usize) -> Refusal {
    Refusal::new(code::DATA_TOO_LONG, format!("{what} is too long"))
        .detail(format!("It has {len} bytes; at most {max} are allowed."))
        .hint(format!("Use a shorter {what}, or a hash of it."))
}

/// A token that is zero or negative.
pub fn token_not_positive(token: i64) -> Refusal {
    Refusal::new(code::INVALID_PARAMETER, "token must be positive")
        .detail(format!("The token is {token}."))
        .hint("Pass the token that acquire_lease returned.")
}

/// The library is not preloaded. `line` is the exact line for postgresql.conf.
pub fn not_preloaded(line: &str) -> Refusal {
    Refusal::new(
        code::NOT_IN_PREREQUISITE_STATE,
        "leasehold is not in shared_preload_libraries",
    )
    .detail("Its leases live in shared memory, which is set aside when the server starts.")
    .hint(format!(
        "Put this line into postgresql.conf and restart the server: {line}"
    ))
}

/// await_lease() where the transaction must not be ended.
pub fn await_in_block() -> Refusal {
    Refusal::new(
        code::ACTIVE_TRANSACTION,
        "await_lease() cannot run inside a transaction block",
    )
    .detail("It ends its transaction while it waits, so that it holds no snapshot.")
    .hint("CALL it in a statement of its own, not in a function or a block with an EXCEPTION clause; or use acquire_lease() with a wait.")
}

/// A call from a parallel worker, whose locks and lists end with it.
pub fn in_parallel() -> Refusal {
    Refusal::new(
        code::INVALID_TRANSACTION_STATE,
        "cannot use leases during a parallel operation",
    )
    .detail("What a parallel worker acquires, fences or releases would end with the worker.")
    .hint("Do not declare functions PARALLEL SAFE that call leasehold's.")
}

/// The extension's tables are not there (dropped meanwhile).
pub fn no_ledger() -> Refusal {
    Refusal::new(
        code::NOT_IN_PREREQUISITE_STATE,
        "leasehold is not installed in this database",
    )
    .detail("The table leasehold.ledger does not exist.")
    .hint("Run: CREATE EXTENSION leasehold;")
}

/// A call that needs a primary.
pub fn on_standby(call: &str) -> Refusal {
    Refusal::new(
        code::READ_ONLY_TRANSACTION,
        format!("cannot execute {call} on a standby"),
    )
    .detail("The server is in recovery; leases are granted and checked by the primary.")
    .hint("Connect to the primary.")
}

/// A call that writes the ledger, in a read-only transaction.
pub fn read_only(call: &str, why: &str) -> Refusal {
    Refusal::new(
        code::READ_ONLY_TRANSACTION,
        format!("cannot execute {call} in a read-only transaction"),
    )
    .detail(why)
    .hint("Use a read-write transaction.")
}
