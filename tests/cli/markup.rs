//! HTML and SVG as XML has them, for files that the program writes.

/// What a page holds.
#[derive(Debug, Default)]
pub(crate) struct Page {
    /// Names of the elements.
    pub(crate) elements: Vec<String>,
    /// Names and values.
    pub(crate) attributes: Vec<(String, String)>,
    /// All text, also that of a style sheet.
    pub(crate) text: String,
}

impl Page {
    /// Reads a page. Panics where elements are not nested, a value has no quotation marks, or an `&` begins no known entity. Of the
    /// elements that HTML does not close, it knows `meta`.
    pub(crate) fn parse(page: &str) -> Self {
        let (mut found, mut open, mut rest) = (Self::default(), Vec::new(), page);
        while let Some((text, after)) = rest.split_once('<') {
            found.text += &plain(text);
            let end = if after.starts_with("!--") { "-->" } else { ">" };
            let (tag, after) = after.split_once(end).unwrap_or_else(|| panic!("<{after:.80} does not end"));
            rest = after;
            if tag.starts_with('!') {
                continue; // the document type, or a comment
            }
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "</{name}> before {rest:.80}");
                continue;
            }
            let (tag, is_closed) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
            let (name, attributes) = tag.split_once(' ').unwrap_or((tag, ""));
            found.elements.push(name.to_owned());
            found.add_attributes(attributes);
            if !is_closed && name != "meta" {
                open.push(name);
            }
        }
        assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} are open at the end, before {rest:?}");
        found
    }

    fn add_attributes(&mut self, mut attributes: &str) {
        while !attributes.trim().is_empty() {
            let wrong = || panic!("no attribute: {attributes}");
            let (name, after) = attributes.trim_start().split_once("=\"").unwrap_or_else(wrong);
            let (value, after) = after.split_once('"').unwrap_or_else(wrong);
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || "-:".contains(c)), "{attributes}");
            self.attributes.push((name.to_owned(), plain(value)));
            attributes = after;
        }
    }

    /// Panics if a browser would load something else for this page.
    pub(crate) fn needs_no_network(&self) {
        let loads = |(name, value): &&(String, String)| {
            ["href", "src", "xlink:href", "srcset", "data", "action"].contains(&name.as_str()) || value.contains("url(")
        };
        assert_eq!(self.attributes.iter().find(loads), None);
        assert!(!self.elements.iter().any(|name| ["script", "link", "iframe", "object"].contains(&name.as_str())));
        assert!(!self.text.contains("url(") && !self.text.contains("@import"), "{}", self.text);
    }
}

/// Text with its characters instead of entities.
fn plain(text: &str) -> String {
    let mut parts = text.split('&');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (entity, after) = part.split_once(';').unwrap_or_else(|| panic!("no entity: &{part:.80}"));
        plain += match entity {
            "amp" => "&",
            "lt" => "<",
            "gt" => ">",
            "quot" => "\"",
            other => panic!("an unknown entity: &{other}"),
        };
        plain += after;
    }
    assert!(!text.contains('>'), "{text}");
    plain
}

#[test]
fn what_is_not_well_formed_is_found() {
    let page = Page::parse(
        "<!DOCTYPE html>\n<!-- <p> --><html lang=\"en\"><meta charset=\"utf-8\"><p>a&lt;b</p><br/></html>\n",
    );
    assert_eq!((page.elements.join(" "), page.text.trim()), ("html meta p br".to_owned(), "a<b"));
    assert_eq!(page.attributes[0], ("lang".to_owned(), "en".to_owned()));
    page.needs_no_network();
    for wrong in ["<p><b></p></b>", "<p>", "a", "<p x=1></p>", "<p>a & b</p>", "<p>a > b</p>", "<p", "</p>"] {
        assert!(std::panic::catch_unwind(|| Page::parse(wrong)).is_err(), "{wrong}");
    }
    for wrong in ["<img src=\"https://a/b.png\"/>", "<style>@import \"a\"</style>", "<p style=\"background: url(a)\"/>"]
    {
        assert!(std::panic::catch_unwind(|| Page::parse(wrong).needs_no_network()).is_err(), "{wrong}");
    }
}
