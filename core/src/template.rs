//! Resource templates: `'nightly-report'`, `'invoice:{id}'`, with `{{` and `}}` for literal braces.
//!
//! **A column name is what stands between the braces, letter for letter**: no folding, no trimming,
//! no quoting rules. It cannot hold a brace. Whether the table has such a column, and what its value
//! is as text, is not decided here.

use std::fmt;

/// A resource with the places where a row's values go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    pieces: Vec<Piece>,
}

/// A part of a [`Template`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text to take as it is; never empty, and never next to another text.
    Text(String),
    /// The name of the column whose value goes here; never empty.
    Column(String),
}

/// Why a text is no template (42601). Positions are bytes, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TemplateError {
    /// Nothing there: it would name the empty resource.
    Empty,
    /// A `{` that no `}` closes before the end or the next `{`.
    Unclosed(usize),
    /// A `}` that closes nothing.
    Stray(usize),
    /// `{}`: no name between the braces.
    NoName(usize),
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("resource template is empty"),
            Self::Unclosed(at) => write!(f, "unclosed brace at byte {at} of resource template"),
            Self::Stray(at) => write!(f, "stray closing brace at byte {at} of resource template"),
            Self::NoName(at) => write!(f, "empty column name at byte {at} of resource template"),
        }
    }
}

impl std::error::Error for TemplateError {}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// [`TemplateError`] says what is wrong, and where.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let mut template = Self { pieces: Vec::new() };
        let mut rest = text;
        while let Some(brace) = rest.find(['{', '}']) {
            let (plain, at_brace) = rest.split_at(brace);
            template.push_text(plain);
            // position of the brace, from 1
            let at = text.len().saturating_sub(at_brace.len()).saturating_add(1);
            rest = template.parse_brace(at_brace, at)?;
        }
        template.push_text(rest);
        if template.pieces.is_empty() {
            return Err(TemplateError::Empty);
        }
        Ok(template)
    }

    /// Reads what starts with a brace: a literal one or a column. Returns the text behind it.
    fn parse_brace<'a>(&mut self, text: &'a str, at: usize) -> Result<&'a str, TemplateError> {
        for (doubled, literal) in [("{{", "{"), ("}}", "}")] {
            if let Some(rest) = text.strip_prefix(doubled) {
                self.push_text(literal);
                return Ok(rest);
            }
        }
        let inside = text.strip_prefix('{').ok_or(TemplateError::Stray(at))?;
        let (name, rest) = inside.split_once('}').ok_or(TemplateError::Unclosed(at))?;
        if name.contains('{') {
            return Err(TemplateError::Unclosed(at));
        }
        if name.is_empty() {
            return Err(TemplateError::NoName(at));
        }
        self.pieces.push(Piece::Column(name.to_owned()));
        Ok(rest)
    }

    /// Adds text, to the last piece where that is text too.
    fn push_text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.pieces.last_mut() {
            Some(Piece::Text(last)) => last.push_str(text),
            _ => self.pieces.push(Piece::Text(text.to_owned())),
        }
    }

    /// The parts in order, at least one.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The resource, where it is the same for every row.
    #[must_use]
    pub fn constant(&self) -> Option<&str> {
        match self.pieces.as_slice() {
            [Piece::Text(text)] => Some(text),
            _ => None,
        }
    }

    /// The column names in order, as often as they stand in the template.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Column(name) => Some(name.as_str()),
            Piece::Text(_) => None,
        })
    }
}

/// The template whose constant is `text`: its braces doubled.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('{', "{{").replace('}', "}}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn text(s: &str) -> Piece {
        Piece::Text(s.to_owned())
    }

    fn column(s: &str) -> Piece {
        Piece::Column(s.to_owned())
    }

    #[test]
    fn a_constant_is_one_text() {
        let template = Template::parse("nightly-report").unwrap();
        assert_eq!(template.pieces(), [text("nightly-report")]);
        assert_eq!(template.constant(), Some("nightly-report"));
        assert_eq!(template.columns().count(), 0);
    }

    #[test]
    fn columns_stand_between_texts() {
        let template = Template::parse("invoice:{id}/{part}{id}.").unwrap();
        let want = [
            text("invoice:"),
            column("id"),
            text("/"),
            column("part"),
            column("id"),
            text("."),
        ];
        assert_eq!(template.pieces(), want);
        assert_eq!(template.constant(), None);
        assert_eq!(template.columns().collect::<Vec<_>>(), ["id", "part", "id"]);
    }

    #[test]
    fn a_lone_column_is_no_constant() {
        let template = Template::parse("{id}").unwrap();
        assert_eq!(template.pieces(), [column("id")]);
        assert_eq!(template.constant(), None);
    }

    #[test]
    fn doubled_braces_are_literal_and_merge_with_text() {
        let constant = |s| Template::parse(s).unwrap().constant().map(str::to_owned);
        assert_eq!(constant("a{{b}}c").as_deref(), Some("a{b}c"));
        assert_eq!(constant("{{}}").as_deref(), Some("{}"));
        assert_eq!(constant("{{{{").as_deref(), Some("{{"));
        assert_eq!(
            Template::parse("{{{id}}}").unwrap().pieces(),
            [text("{"), column("id"), text("}")]
        );
    }

    #[test]
    fn names_are_taken_letter_for_letter() {
        let template = Template::parse("{ Id }{\"x\"}{größe}").unwrap();
        assert_eq!(
            template.columns().collect::<Vec<_>>(),
            [" Id ", "\"x\"", "größe"]
        );
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        use TemplateError::{Empty, NoName, Stray, Unclosed};
        let wrong = |s| Template::parse(s).unwrap_err();
        assert_eq!(wrong(""), Empty);
        assert_eq!(wrong("{"), Unclosed(1));
        assert_eq!(wrong("é{id"), Unclosed(3));
        assert_eq!(wrong("{a{b}"), Unclosed(1));
        assert_eq!(wrong("{a{{b}"), Unclosed(1));
        assert_eq!(wrong("}"), Stray(1));
        assert_eq!(wrong("{id}}"), Stray(5));
        assert_eq!(wrong("{{id}"), Stray(5));
        assert_eq!(wrong("a}b}}"), Stray(2));
        assert_eq!(wrong("{}"), NoName(1));
        assert_eq!(wrong("x{}}"), NoName(2));
    }

    #[test]
    fn messages_are_lower_case_and_say_where() {
        assert_eq!(
            TemplateError::Empty.to_string(),
            "resource template is empty"
        );
        assert_eq!(
            TemplateError::Unclosed(9).to_string(),
            "unclosed brace at byte 9 of resource template"
        );
        assert_eq!(
            TemplateError::Stray(5).to_string(),
            "stray closing brace at byte 5 of resource template"
        );
        assert_eq!(
            TemplateError::NoName(1).to_string(),
            "empty column name at byte 1 of resource template"
        );
    }
}
