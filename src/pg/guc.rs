//! The setting `leasehold.token`, which needs hooks, and the reserved prefix.

use std::ffi::{CStr, CString, c_char, c_void};

use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};
use pgrx::{pg_guard, pg_sys};

use super::c_string;

/// Defines `leasehold.token`: checked when it is set, parsed when it is first needed.
pub fn define_token_setting(setting: &'static GucSetting<Option<CString>>) {
    // SAFETY: both hooks are guarded
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            c"leasehold.token",
            c"Fencing tokens that the session presents.",
            c"One, or several separated by commas. Empty: none.",
            setting,
            GucContext::Userset,
            GucFlags::default(),
            Some(check_token),
            Some(assign_token),
            None,
        );
    }
}

/// Defines `leasehold.notify_channel`: it must be a name that NOTIFY takes.
pub fn define_channel_setting(setting: &'static GucSetting<Option<CString>>) {
    // SAFETY: the hook is guarded
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            c"leasehold.notify_channel",
            c"Channel on which each database tells of its events, for LISTEN.",
            c"By the worker, after some seconds. Empty: none.",
            setting,
            GucContext::Sighup,
            GucFlags::default(),
            Some(check_channel),
            None,
            None,
        );
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn check_channel(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: PostgreSQL passes a valid C string, or null for no value; the copy is reported and forgotten
    unsafe {
        let is_name = value.is_null()
            || (*value).is_null()
            || CStr::from_ptr(*value).count_bytes() < pg_sys::NAMEDATALEN as usize;
        if !is_name {
            let detail = c"The name of a channel has 63 bytes at most.";
            pg_sys::GUC_check_errdetail_string = pg_sys::pstrdup(detail.as_ptr());
        }
        is_name
    }
}

/// Makes unknown settings under `leasehold.` an error.
pub fn reserve_prefix() {
    // SAFETY: a C string that lives for ever
    unsafe { pg_sys::MarkGUCPrefixReserved(c"leasehold".as_ptr()) };
}

#[pg_guard]
unsafe extern "C-unwind" fn check_token(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: PostgreSQL passes a valid C string, or null for no value
    let text = unsafe {
        if value.is_null() || (*value).is_null() {
            return true;
        }
        CStr::from_ptr(*value)
    };
    let problem = match text.to_str() {
        Ok(text) => crate::settings::token_list_error(text),
        Err(_) => Some("It is not a list of numbers.".to_owned()),
    };
    match problem {
        None => true,
        Some(problem) => {
            let detail = c_string(problem);
            let hint = c"SET leasehold.token = '<token>', as acquire_lease returned it, or several separated by commas.";
            // SAFETY: palloc'd copies, which the caller of the hook reports and forgets
            unsafe {
                pg_sys::GUC_check_errdetail_string = pg_sys::pstrdup(detail.as_ptr());
                pg_sys::GUC_check_errhint_string = pg_sys::pstrdup(hint.as_ptr());
            }
            false
        }
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn assign_token(_value: *const c_char, _extra: *mut c_void) {
    crate::settings::token_assigned();
}
