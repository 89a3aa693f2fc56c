//! Text between Rust, which is UTF-8, and the server, whose databases may be in another encoding.
//!
//! Names of resources and holders are bytes and stay bytes; only messages and labels that Rust puts
//! together are converted.

use std::ffi::{CStr, c_char, c_int};

use pgrx::pg_sys;

use super::c_string;

const UTF8: c_int = pg_sys::pg_enc::PG_UTF8 as c_int;
const SQL_ASCII: c_int = pg_sys::pg_enc::PG_SQL_ASCII as c_int;

/// Whether the database's texts need conversion. SQL_ASCII takes any bytes.
fn converts() -> bool {
    // SAFETY: reads a variable of this process
    let encoding = unsafe { pg_sys::GetDatabaseEncoding() };
    encoding != UTF8 && encoding != SQL_ASCII
}

/// Bytes in the server's encoding as a Rust string, for a message. What is not text in that encoding
/// is shown as `?`, because an invalid sequence would make the error report itself fail.
pub fn to_utf8(bytes: &[u8]) -> String {
    if converts() {
        convert(bytes, |text, len| {
            // SAFETY: a C string of that length; raises where it is not valid in its encoding
            unsafe { pg_sys::pg_server_to_any(text, len, UTF8) }
        })
        .map_or_else(|| masked(bytes), |text| masked(&text))
    } else {
        masked(bytes)
    }
}

fn masked(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes
            .iter()
            .map(|b| if b.is_ascii() { *b as char } else { '?' })
            .collect(),
    }
}

/// A Rust string in the server's encoding.
pub fn to_server(text: &str) -> Vec<u8> {
    if converts() && !text.is_ascii() {
        convert(text.as_bytes(), |text, len| {
            // SAFETY: a C string of that length, valid UTF-8; raises for a character that the
            // encoding lacks
            unsafe { pg_sys::pg_any_to_server(text, len, UTF8) }
        })
        .unwrap_or_else(|| text.as_bytes().to_vec())
    } else {
        text.as_bytes().to_vec()
    }
}

/// The result of a conversion that returns its argument or a palloc'd string.
fn convert(
    bytes: &[u8],
    conversion: impl FnOnce(*const c_char, c_int) -> *mut c_char,
) -> Option<Vec<u8>> {
    let text = c_string(bytes);
    let len = c_int::try_from(text.as_bytes().len()).ok()?;
    let converted = conversion(text.as_ptr(), len);
    // SAFETY: a NUL-terminated string: the argument itself, still alive, or a palloc'd one
    (!converted.is_null()).then(|| unsafe { CStr::from_ptr(converted) }.to_bytes().to_vec())
}
