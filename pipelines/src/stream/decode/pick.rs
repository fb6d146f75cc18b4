//! Picks the values of some pointers out of a JSON document and skips the rest.
//!
//! The whole document is checked, but nothing is built of it: a value that is picked is the part of the document that it
//! is written in. So numbers keep all their digits. Of several members with one key the last counts, as in serde_json and
//! arrow-json.

use std::{fmt, ops::Range};

use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::pointer::Pointer;

/// White space of JSON.
const BLANK: [char; 4] = [' ', '\t', '\n', '\r'];

/// Some pointers as a tree.
#[derive(Debug, Default)]
pub(super) struct Picker {
    root: Node,
}

/// A place in documents, and what is wanted of it.
#[derive(Debug, Default)]
struct Node {
    /// Whether the value itself is wanted, under the first number of `wanted`.
    is_wanted: bool,
    /// The numbers of the values that are wanted of it and below it.
    wanted: Range<usize>,
    children: Vec<Child>,
}

#[derive(Debug)]
struct Child {
    key: String,
    /// The key as the index of an array.
    index: Option<usize>,
    node: Node,
}

/// What was picked, by number.
pub(super) type Picked<'j> = Vec<Option<&'j str>>;

impl Picker {
    /// Picks the values of these pointers, and the number of each: equal pointers have one.
    pub(super) fn new(pointers: &[&Pointer]) -> (Self, Vec<usize>) {
        let mut root = Node::default();
        for pointer in pointers {
            let node = pointer.tokens().iter().fold(&mut root, |node, token| node.child(token));
            node.is_wanted = true;
        }
        root.number(0);
        let number = |pointer: &&Pointer| {
            let mut node = &root;
            for token in pointer.tokens() {
                node = node.children.iter().find(|child| &child.key == token).map_or(node, |child| &child.node);
            }
            node.wanted.start
        };
        let numbers = pointers.iter().map(number).collect();
        (Self { root }, numbers)
    }

    /// Sets `picked` to the values in a document.
    ///
    /// # Errors
    /// When the document is not JSON.
    pub(super) fn pick<'j>(&self, json: &'j str, picked: &mut Picked<'j>) -> serde_json::Result<()> {
        picked.clear();
        picked.resize(self.root.wanted.end, None);
        if self.root.is_wanted {
            picked[0] = Some(json.trim_matches(BLANK));
        }
        self.root.pick_below(json, picked)
    }
}

impl Node {
    fn child(&mut self, key: &str) -> &mut Self {
        let place = self.children.iter().position(|child| child.key == key).unwrap_or_else(|| {
            self.children.push(Child { key: key.to_owned(), index: array_index(key), node: Self::default() });
            self.children.len() - 1
        });
        &mut self.children[place].node
    }

    /// Numbers the wanted values from `first`; returns the next number.
    fn number(&mut self, first: usize) -> usize {
        let mut next = first + usize::from(self.is_wanted);
        for child in &mut self.children {
            next = child.node.number(next);
        }
        self.wanted = first..next;
        next
    }

    /// Picks the values below this one, which is `json`.
    fn pick_below<'j>(&self, json: &'j str, picked: &mut Picked<'j>) -> serde_json::Result<()> {
        let mut document = serde_json::Deserializer::from_str(json);
        let below = Below { node: self, picked };
        match json.trim_start_matches(BLANK).as_bytes().first() {
            Some(b'{') if !self.children.is_empty() => document.deserialize_map(below)?,
            Some(b'[') if !self.children.is_empty() => document.deserialize_seq(below)?,
            _ => _ = IgnoredAny::deserialize(&mut document)?,
        }
        document.end()
    }

    /// Picks of a value.
    fn pick<'j>(&self, json: &'j str, picked: &mut Picked<'j>) -> serde_json::Result<()> {
        // An earlier member may have had the same key.
        picked[self.wanted.clone()].fill(None);
        if self.is_wanted {
            picked[self.wanted.start] = Some(json);
        }
        if self.children.is_empty() { Ok(()) } else { self.pick_below(json, picked) }
    }
}

/// A token as the index of an array; RFC 6901 allows no leading zeros.
fn array_index(token: &str) -> Option<usize> {
    let is_index = token == "0" || (!token.starts_with('0') && token.bytes().all(|byte| byte.is_ascii_digit()));
    token.parse().ok().filter(|_| is_index)
}

/// The members or items of a value.
struct Below<'n, 'p, 'j> {
    node: &'n Node,
    picked: &'p mut Picked<'j>,
}

impl<'j> Visitor<'j> for Below<'_, '_, 'j> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<A: MapAccess<'j>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(child) = members.next_key_seed(Key(self.node))? {
            let Some(child) = child else {
                members.next_value::<IgnoredAny>()?;
                continue;
            };
            let value: &'j RawValue = members.next_value()?;
            child.pick(value.get(), self.picked).map_err(serde::de::Error::custom)?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'j>>(self, mut items: A) -> Result<(), A::Error> {
        for index in 0.. {
            let Some(child) = self.node.children.iter().find(|child| child.index == Some(index)) else {
                match items.next_element::<IgnoredAny>()? {
                    Some(_) => continue,
                    None => break,
                }
            };
            let Some(value) = items.next_element::<&'j RawValue>()? else { break };
            child.node.pick(value.get(), self.picked).map_err(serde::de::Error::custom)?;
        }
        Ok(())
    }
}

/// Finds the child that a key leads to.
struct Key<'n>(&'n Node);

impl<'j, 'n> DeserializeSeed<'j> for Key<'n> {
    type Value = Option<&'n Node>;

    fn deserialize<D: Deserializer<'j>>(self, key: D) -> Result<Self::Value, D::Error> {
        key.deserialize_str(self)
    }
}

impl<'n> Visitor<'_> for Key<'n> {
    type Value = Option<&'n Node>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(self.0.children.iter().find(|child| child.key == key).map(|child| &child.node))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn picked<'j>(json: &'j str, pointers: &[&str]) -> Vec<Option<&'j str>> {
        let pointers: Vec<Pointer> = pointers.iter().map(|pointer| Pointer::parse(pointer).unwrap()).collect();
        let (picker, numbers) = Picker::new(&pointers.iter().collect::<Vec<_>>());
        let mut picked = Vec::new();
        picker.pick(json, &mut picked).unwrap();
        numbers.into_iter().map(|number| picked[number]).collect()
    }

    /// By hand, from RFC 6901.
    #[test]
    fn values_are_picked_as_they_are_written() {
        let json = r#" {"a": {"b": [10, {"c": "\u00e9"}], "": 1.50}, "x": 18446744073709551616, "m~/": null} "#;
        let pointers = ["", "/a/b/1/c", "/a/b/0", "/a/b/01", "/a/b/-", "/a/b/2", "/a/", "/x", "/m~0~1", "/x/y", "/x"];
        let values = [
            Some(json.trim()),
            Some(r#""\u00e9""#),
            Some("10"),
            None,
            None,
            None,
            Some("1.50"),
            Some("18446744073709551616"),
            Some("null"),
            None,
            Some("18446744073709551616"),
        ];
        assert_eq!(picked(json, &pointers), values);
        assert_eq!(picked(r#"{"a": {"b": 1, "c": 2}, "a": {"c": 3}}"#, &["/a/b", "/a/c"]), [None, Some("3")]);
        assert_eq!(picked(r#"{"\u0061": 1}"#, &["/a", ""]), [Some("1"), Some(r#"{"\u0061": 1}"#)]);
        assert_eq!(picked("7", &["/a", ""]), [None, Some("7")]);
    }

    #[test]
    fn what_is_not_json_is_an_error() {
        let deep = "[".repeat(100_000);
        for json in
            ["", "{", "{\"a\": 1}}", "{\"a\": 01}", "[1,]", "nul", "{\"a\": \"\n\"}", "{'a': 1}", &deep, "\u{feff}{}"]
        {
            let pointer = Pointer::parse("/a/b").unwrap();
            for pointers in [&[][..], &[&pointer][..]] {
                assert!(
                    Picker::new(pointers).0.pick(json, &mut Vec::new()).is_err(),
                    "{}",
                    &json[..json.len().min(20)]
                );
            }
        }
    }

    fn json() -> impl Strategy<Value = Value> {
        let single = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        single.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[ab~/01\"]{0,2}", inner, 0..5)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Expected: serde_json's own pointers, in the document as serde_json reads it, which rounds some floats.
        #[test]
        fn pointers_find_what_serde_json_finds(
            document in json(),
            tokens in prop::collection::vec(prop::collection::vec("[ab~/01\"]{0,2}", 0..4), 0..6),
            pretty in any::<bool>(),
        ) {
            let escaped = |token: &String| format!("/{}", token.replace('~', "~0").replace('/', "~1"));
            let pointers: Vec<String> = tokens.iter().map(|tokens| tokens.iter().map(escaped).collect()).collect();
            let written = if pretty { format!("{document:#}") } else { document.to_string() };
            let found = picked(&written, &pointers.iter().map(String::as_str).collect::<Vec<_>>());
            let document: Value = serde_json::from_str(&written).unwrap();
            for (pointer, found) in pointers.iter().zip(found) {
                let found = found.map(|json| serde_json::from_str::<Value>(json).unwrap());
                prop_assert_eq!(found.as_ref(), document.pointer(pointer), "{}", pointer);
            }
        }
    }
}
