//! The settings, with their getters. Durations are microseconds here and milliseconds in the GUCs.
//!
//! The presented tokens of `leasehold.token` are parsed once per assignment.

use std::cell::Cell;
use std::ffi::CString;

use leasehold_core::token::{TokenList, parse_list};
use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};

use crate::pg;

static MAX_LEASES: GucSetting<i32> = GucSetting::<i32>::new(16_384);
static DEFAULT_TTL_MS: GucSetting<i32> = GucSetting::<i32>::new(30_000);
static MAX_TTL_MS: GucSetting<i32> = GucSetting::<i32>::new(300_000);
static TOKEN: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// More than this many leases need more memory than the lock table could ever fence.
const MAX_LEASES_LIMIT: i32 = 1_000_000;

/// Live leases that always fit the shared table.
pub fn max_leases() -> usize {
    usize::try_from(MAX_LEASES.get()).unwrap_or(1)
}

/// TTL when none is given; `max_ttl` where the default is above it.
pub fn default_ttl_us() -> i64 {
    (i64::from(DEFAULT_TTL_MS.get()) * 1000).min(max_ttl_us())
}

/// Longest TTL allowed.
pub fn max_ttl_us() -> i64 {
    i64::from(MAX_TTL_MS.get()) * 1000
}

thread_local! {
    static PRESENTED: Cell<Option<TokenList>> = const { Cell::new(None) };
}

/// The tokens that the session presents by `leasehold.token`.
pub fn presented() -> TokenList {
    if let Some(list) = PRESENTED.get() {
        return list;
    }
    let text = TOKEN.get().unwrap_or_default();
    // the check hook has refused everything that does not parse
    let list = parse_list(text.to_str().unwrap_or_default()).unwrap_or_default();
    PRESENTED.set(Some(list));
    list
}

/// Says why a value of `leasehold.token` is refused, or nothing.
pub fn token_list_error(text: &str) -> Option<String> {
    parse_list(text).err().map(|e| format!("{e}"))
}

/// `leasehold.token` has a new value.
pub fn token_assigned() {
    PRESENTED.set(None);
    crate::xact::invalidate();
}

/// Defines the settings. Only while preloading.
pub fn define() {
    GucRegistry::define_int_guc(
        c"leasehold.max_leases",
        c"Live leases that always fit the shared table.",
        c"Half as many more may. Memory: about 800 bytes each, taken at server start.",
        &MAX_LEASES,
        1,
        MAX_LEASES_LIMIT,
        GucContext::Postmaster,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"leasehold.default_ttl",
        c"TTL of a lease when none is given.",
        c"Acts as leasehold.max_ttl where it is above it.",
        &DEFAULT_TTL_MS,
        1,
        i32::MAX,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"leasehold.max_ttl",
        c"Longest TTL allowed.",
        c"Also how long nothing is granted after a promotion. The same on all servers.",
        &MAX_TTL_MS,
        1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    pg::guc::define_token_setting(&TOKEN);
    pg::guc::reserve_prefix();
}
