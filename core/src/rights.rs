//! Patterns: which resources a rule is about.

use crate::name::RESOURCE_BYTES_MAX;

/// A resource, or all resources that begin with a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One by name.
    Exact(Vec<u8>),
    /// All that begin with it; with an empty one, all there are.
    Prefix(Vec<u8>),
}

impl Pattern {
    /// Reads a pattern: a trailing `*` makes it a prefix, a trailing `\*` stands for a name that ends in `*`.
    ///
    /// # Errors
    /// The length of a name that is above [`RESOURCE_BYTES_MAX`].
    pub fn parse(pattern: &[u8]) -> Result<Pattern, usize> {
        let parsed = if let Some(name) = pattern.strip_suffix(b"\\*") {
            Pattern::Exact([name, b"*"].concat())
        } else if let Some(prefix) = pattern.strip_suffix(b"*") {
            Pattern::Prefix(prefix.to_vec())
        } else {
            Pattern::Exact(pattern.to_vec())
        };
        let (Pattern::Exact(name) | Pattern::Prefix(name)) = &parsed;
        if name.len() > RESOURCE_BYTES_MAX {
            return Err(name.len());
        }
        Ok(parsed)
    }

    /// Whether it is about that resource.
    #[must_use]
    pub fn matches(&self, resource: &[u8]) -> bool {
        match self {
            Pattern::Exact(name) => name == resource,
            Pattern::Prefix(prefix) => resource.starts_with(prefix),
        }
    }

    /// Of patterns that match one resource, the highest decides: a name before all prefixes, a longer prefix before a
    /// shorter one.
    #[must_use]
    pub fn closeness(&self) -> usize {
        match self {
            Pattern::Exact(_) => usize::MAX,
            Pattern::Prefix(prefix) => prefix.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(pattern: &str) -> Pattern {
        Pattern::parse(pattern.as_bytes()).unwrap_or(Pattern::Exact(Vec::new()))
    }

    #[test]
    fn a_trailing_star_is_a_prefix_unless_escaped() {
        assert_eq!(parsed("a*"), Pattern::Prefix(b"a".to_vec()));
        assert_eq!(parsed("a\\*"), Pattern::Exact(b"a*".to_vec()));
        assert_eq!(parsed("*"), Pattern::Prefix(Vec::new()));
        assert_eq!(parsed("\\*"), Pattern::Exact(b"*".to_vec()));
        assert_eq!(parsed("a*b"), Pattern::Exact(b"a*b".to_vec()));
        assert_eq!(parsed("a**"), Pattern::Prefix(b"a*".to_vec()));
        assert_eq!(parsed("a\\"), Pattern::Exact(b"a\\".to_vec()));
    }

    #[test]
    fn what_matches() {
        assert!(parsed("a*").matches(b"a") && parsed("a*").matches(b"ab"));
        assert!(!parsed("a*").matches(b"b") && !parsed("ab*").matches(b"a"));
        assert!(parsed("*").matches(b"anything"));
        assert!(parsed("a").matches(b"a") && !parsed("a").matches(b"ab"));
        assert!(parsed("a\\*").matches(b"a*") && !parsed("a\\*").matches(b"ab"));
    }

    #[test]
    fn a_name_is_closer_than_any_prefix_of_it() {
        assert!(parsed("ab").closeness() > parsed("ab*").closeness());
        assert!(parsed("ab*").closeness() > parsed("a*").closeness());
        assert!(parsed("a*").closeness() > parsed("*").closeness());
    }

    #[test]
    fn lengths_are_those_of_names() {
        let longest = "x".repeat(RESOURCE_BYTES_MAX);
        assert!(Pattern::parse(longest.as_bytes()).is_ok());
        assert!(Pattern::parse(format!("{longest}*").as_bytes()).is_ok());
        assert_eq!(
            Pattern::parse(format!("{longest}x").as_bytes()),
            Err(RESOURCE_BYTES_MAX + 1)
        );
    }
}
