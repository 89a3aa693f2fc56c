//! leasehold: leases and fencing tokens inside PostgreSQL.
//!
//! A table of contents; DESIGN and the way of a call through these modules are in ARCHITECTURE.md.
//!
//! - `api`: the SQL functions: arguments in, answers out
//! - `acquire`, `fence`: how a lease begins, and how a token is checked
//! - `wait`: the queue of those who wait for a resource
//! - `drain`: how a grant waits for old transactions, and what ends zombies
//! - `trigger`, `attach`: the row trigger, and what puts it on a table
//! - `resources`: from a name to its entry, in the shared table or from the ledger
//! - `table`: the shared table
//! - `rights`: which roles may acquire what, and how much
//! - `ledger`, `tokens`: what is durable, and the token sequence
//! - `marks`: releases that the ledger has not been told of
//! - `xact`: what a transaction has to undo or complete
//! - `sweep`: old rows of the ledger
//! - `stats`, `events`: what is counted, and the flight recorder
//! - `worker`, `settings`, `errors`
//! - `pg`: the only raw PostgreSQL calls

#![deny(unsafe_code)]
#![deny(ffi_unwind_calls)]

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

mod acquire;
mod api;
mod attach;
mod drain;
mod errors;
mod events;
mod fence;
mod ledger;
mod marks;
mod pg;
mod resources;
mod rights;
mod settings;
mod stats;
mod sweep;
mod table;
mod tokens;
mod trigger;
mod wait;
mod worker;
mod xact;

#[cfg(not(panic = "unwind"))]
compile_error!("leasehold must be built with panic = \"unwind\"");

pgrx::pg_module_magic!(name = c"leasehold", version = c"0.1.0");

pgrx::extension_sql_file!("../sql/catalog.sql", name = "catalog", finalize);

/// Called when the library is loaded: by the server at its start, or too late, by a backend. 55000.
#[pg_guard]
pub extern "C-unwind" fn _PG_init() {
    if pg::is_binary_upgrade() {
        return;
    }
    if !pg::is_preloading() {
        let refusal = errors::not_preloaded(&api::preload_line());
        ErrorReport::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            refusal.message,
            "_PG_init",
        )
        .set_detail(refusal.detail.unwrap_or_default())
        .set_hint(refusal.hint.unwrap_or_default())
        .report(PgLogLevel::ERROR);
    }
    pg::look_at_version();
    settings::define();
    table::register();
    pg::sessions::register();
    pg::waiters::register();
    pg::counters::register();
    pg::ring::register();
    pg::hooks::register();
    pg::hooks::register_worker();
}
