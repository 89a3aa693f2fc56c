//! Names: the limits on resources and holders, the hash that names a resource in the lock table, and
//! the label of a holder that gave none.
//!
//! **[`hash`] never changes.** A prepared transaction keeps its lock tag in its state file, over
//! restarts and over upgrades of this library. A library that hashed otherwise would look for the
//! writer under another tag, find nobody, and grant while the old write can still commit (G3).

use xxhash_rust::xxh3::xxh3_64;

/// Longest resource, in bytes.
pub const RESOURCE_BYTES_MAX: usize = 255;

/// Longest holder, in bytes.
pub const HOLDER_BYTES_MAX: usize = 127;

/// The 64 bits that stand for a resource in its lock tag: XXH3-64 without a seed.
///
/// Two resources with the same hash share a fence lock, so one may have to wait for the writers of
/// the other; their tokens are never mixed up.
#[must_use]
pub fn hash(resource: &[u8]) -> u64 {
    xxh3_64(resource)
}

/// The label of a holder that gave none: `user/application/pid`, or `user/pid` where the application
/// gave no name. At most [`HOLDER_BYTES_MAX`] bytes, never empty.
///
/// The pid is what tells two sessions of one application apart, so it is kept whole and the text
/// before it is cut, between two characters.
#[must_use]
pub fn default_holder(session_user: &str, application_name: &str, pid: i32) -> String {
    let mut label = String::from(session_user);
    if !application_name.is_empty() {
        label.push('/');
        label.push_str(application_name);
    }
    let suffix = format!("/{pid}");
    let room = HOLDER_BYTES_MAX.saturating_sub(suffix.len());
    label.truncate(floor_char_boundary(&label, room));
    label.push_str(&suffix);
    label
}

/// The last character boundary of `text` at or before `at`.
fn floor_char_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len()))
        .rev()
        .find(|&i| text.is_char_boundary(i))
        .unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests {
    use super::*;

    /// Values of the reference implementation (the C library), one for each of its code paths by
    /// length. They stand in the state files of prepared transactions: never edit them.
    #[test]
    fn hash_never_changes() {
        let digits: Vec<u8> = (0..255).map(|i| b'0' + i % 10).collect();
        let golden: &[(&[u8], u64)] = &[
            (&digits[..0], 0x2d06_8005_38d3_94c2),
            (&digits[..1], 0x1982_e3a7_bb24_1055),
            (&digits[..3], 0x8ed2_b2f3_6096_5d90),
            (&digits[..4], 0x8aa9_2da1_8edb_594b),
            (&digits[..8], 0x1808_e40d_6723_f646),
            (&digits[..9], 0x3b52_93ce_9b5b_d7d7),
            (&digits[..16], 0x84ab_df53_e8a0_3697),
            (&digits[..17], 0x33c1_2b72_1fdb_9f24),
            (&digits[..128], 0x2f83_c954_0ee3_2c9c),
            (&digits[..129], 0x629d_0d76_0a7c_a820),
            (&digits[..240], 0x7369_7f08_9085_eabd),
            (&digits[..241], 0x367d_0ce9_5644_ade5),
            (&digits[..255], 0x9355_9f13_2471_a15e),
            (b"nightly-report", 0x0c4d_0bd6_3b2a_414b),
            (b"invoice:42", 0x1d7e_27fc_ab4f_c4fd),
            ("größe".as_bytes(), 0xa6d7_bbea_01d4_872c),
        ];
        for (resource, want) in golden {
            assert_eq!(hash(resource), *want, "{} bytes", resource.len());
        }
    }

    #[test]
    fn default_holder_names_user_application_and_pid() {
        assert_eq!(default_holder("ada", "psql", 4711), "ada/psql/4711");
        assert_eq!(default_holder("ada", "", 4711), "ada/4711");
        assert_eq!(default_holder("", "", 7), "/7");
    }

    #[test]
    fn default_holder_cuts_the_application_and_keeps_the_pid() {
        let label = default_holder(&"u".repeat(63), &"a".repeat(63), i32::MAX);
        let want = format!("{}/{}/2147483647", "u".repeat(63), "a".repeat(52));
        assert_eq!(label, want);
        assert_eq!(label.len(), HOLDER_BYTES_MAX);
    }

    #[test]
    fn default_holder_cuts_between_characters() {
        // 'é' takes two bytes: 63 of them leave an odd byte of the room unused
        let label = default_holder(&"é".repeat(63), "x", 1);
        assert_eq!(label, format!("{}/1", "é".repeat(62)));
    }
}
