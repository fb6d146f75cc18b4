//! What pictures for a browser share: files without a network, readable on light and on dark paper.

/// Begins an HTML page.
pub(crate) fn page(title: &str, comment: &str) -> String {
    format!(
        "<!DOCTYPE html>\n{comment}<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{}</title>\n<style>\n\
         body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }}\n\
         svg {{ font: 13px system-ui, sans-serif; max-width: 100%; height: auto; }}\n\
         svg text {{ fill: currentColor; }}\n\
         :root {{ color-scheme: light dark; }}\n</style>\n",
        escaped(title)
    )
}

/// Text as it stands in HTML and XML. Characters that XML does not allow are replaced.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\t' | '\n' | '\r' => out.push(c),
            '\0'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_is_markup() {
        assert_eq!(escaped("a<b> & \"c\"\u{1}\u{ffff}"), "a&lt;b&gt; &amp; &quot;c&quot;\u{fffd}\u{fffd}");
        assert!(page("</title>", "").contains("<title>&lt;/title&gt;</title>"));
    }
}
