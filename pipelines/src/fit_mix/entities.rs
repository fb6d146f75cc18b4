//! Entities of a tagged sentence, as the script conlleval of the CoNLL shared tasks finds them.
//!
//! ```text
//! B-X   begins an entity of type X
//! I-X   goes on with it; without an entity of type X before it, it begins one
//! O     is outside
//! ```
//!
//! `E-X` ends an entity and `S-X` is one, as in IOBES.

/// A tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Tag {
    Outside,
    /// With the letter before the hyphen and the type behind it.
    Inside(Part, String),
}

/// Which part of an entity a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Begin,
    Inner,
    End,
    Single,
}

impl Tag {
    /// `None` for what is no tag of an entity.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text == "O" {
            return Some(Self::Outside);
        }
        let (letter, kind) = text.split_once('-').unwrap_or((text, ""));
        let part = match letter {
            "B" => Part::Begin,
            "I" => Part::Inner,
            "E" => Part::End,
            "S" => Part::Single,
            _ => return None,
        };
        Some(Self::Inside(part, kind.to_owned()))
    }
}

/// An entity: its type, and the tokens `first..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Entity<'t> {
    pub(super) kind: &'t str,
    pub(super) first: usize,
    pub(super) end: usize,
}

/// The entities of a sentence.
pub(super) fn entities<'t>(tags: impl Iterator<Item = &'t Tag>) -> Vec<Entity<'t>> {
    let (mut found, mut open): (Vec<Entity<'t>>, bool) = (Vec::new(), false);
    for (token, tag) in tags.enumerate() {
        let Tag::Inside(part, kind) = tag else {
            open = false;
            continue;
        };
        let goes_on = open && matches!(part, Part::Inner | Part::End);
        match found.last_mut().filter(|last| goes_on && last.kind == kind) {
            Some(last) => last.end = token + 1,
            None => found.push(Entity { kind, first: token, end: token + 1 }),
        }
        open = matches!(part, Part::Begin | Part::Inner);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `X0-2` is an entity of type X of the tokens 0 and 1.
    fn found(tags: &str) -> String {
        let tags: Vec<Tag> = tags.split(' ').map(|tag| Tag::parse(tag).unwrap()).collect();
        let all = entities(tags.iter());
        all.iter().map(|e| format!("{}{}-{}", e.kind, e.first, e.end)).collect::<Vec<_>>().join(" ")
    }

    /// By hand, by the rules of `startOfChunk` and `endOfChunk` in conlleval.pl: an entity begins at B; at I after O; at I after
    /// another type. It ends before B, before O and before another type.
    #[test]
    fn entities_are_those_of_conlleval() {
        for (tags, expected) in [
            ("O O", ""),
            ("B-X I-X O B-Y", "X0-2 Y3-4"),
            ("B-X B-X", "X0-1 X1-2"),
            // I without B.
            ("I-X I-X O I-X", "X0-2 X3-4"),
            ("O I-X", "X1-2"),
            ("B-X I-Y I-Y", "X0-1 Y1-3"),
            ("I-X B-X", "X0-1 X1-2"),
            ("B-X O I-X", "X0-1 X2-3"),
            // Types with hyphens, and none.
            ("B-creative-work I-creative-work", "creative-work0-2"),
            ("B I O B", "0-2 3-4"),
        ] {
            assert_eq!(found(tags), expected, "{tags}");
        }
    }

    #[test]
    fn iobes_is_understood() {
        for (tags, expected) in [
            ("S-X S-X B-X I-X E-X O", "X0-1 X1-2 X2-5"),
            ("B-X E-X I-X", "X0-2 X2-3"),
            ("E-X", "X0-1"),
            ("S-X I-X", "X0-1 X1-2"),
        ] {
            assert_eq!(found(tags), expected, "{tags}");
        }
    }

    #[test]
    fn other_tags_are_no_entities() {
        assert!(["NN", "", "-X", "b-X", "L-X", "o"].iter().all(|tag| Tag::parse(tag).is_none()));
    }
}
