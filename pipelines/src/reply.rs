//! Shortens responses of object stores and web servers for error messages.

use std::fmt;

/// Characters of a long response that are kept, at its beginning and at its end.
const KEPT: (usize, usize) = (200, 100);

/// Summarises a response in one line. Of an XML error, it keeps status, code and message; HTML pages and the middle of
/// long responses are dropped.
pub(crate) fn summary(reply: &impl fmt::Display) -> String {
    let text = reply.to_string();
    if let Some(code) = element(&text, "Code") {
        // The text before the XML contains the request, which errors name already, and the status.
        let before = text.split('<').next().unwrap_or_default();
        let status = before.rsplit_once("status code: ").map_or(before, |(_, status)| status);
        return [shortened(status.trim_end_matches([' ', '\n', ':'])), shortened(code)]
            .into_iter()
            .chain(element(&text, "Message").map(shortened))
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(": ");
    }
    let lower = text.to_ascii_lowercase();
    let page = ["<!doctype html", "<html"].into_iter().filter_map(|tag| lower.find(tag)).min();
    shortened(page.map_or(text.as_str(), |at| text[..at].trim_end_matches([' ', '\n', ':'])))
}

/// The first line of the first XML element with this name.
fn element<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (inner, _) = rest.split_once(&format!("</{name}>"))?;
    inner.trim().lines().next()
}

/// Joins the lines of `text`, and drops the middle if it is long. Control characters, which a terminal would obey, become
/// blanks.
fn shortened(text: &str) -> String {
    let line = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    let line = line.replace(char::is_control, " ");
    let (first, last) = KEPT;
    let count = line.chars().count();
    if count <= first + last {
        return line;
    }
    let at = |n: usize| line.char_indices().nth(n).map_or(line.len(), |(at, _)| at);
    format!("{} … {}", &line[..at(first)], &line[at(count - last)..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_becomes_one_line() {
        let page = "404 Not Found: <!DOCTYPE html>\n<html>\n<body>nothing here</body>";
        assert_eq!(summary(&page), "404 Not Found");
        assert_eq!(summary(&"<Error>\n  <Code>SlowDown</Code>\n</Error>"), "SlowDown");
        // As Amazon's documentation of its error responses shows it, with the longest name of a bucket.
        let answer = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>NoSuchBucket</Code>\
                      <Message>The specified bucket does not exist</Message><BucketName>";
        let reply = format!(
            "Object at location x not found: Error performing PUT https://{0}.s3.amazonaws.com/x in 1 s - Server \
             returned non-2xx status code: 404 Not Found: {answer}{0}</BucketName><HostId>{0}{0}{0}</HostId></Error>",
            "b".repeat(63)
        );
        assert_eq!(summary(&reply), "404 Not Found: NoSuchBucket: The specified bucket does not exist");
        assert_eq!(summary(&"a  b"), "a  b");
        assert_eq!(summary(&"not\u{1b}[2Jfound"), "not [2Jfound");
        assert!(summary(&format!("<Code>{}</Code>", "x".repeat(1000))).len() < 400);
        let long = format!("{}middle{}", "ä".repeat(250), "ö".repeat(250));
        assert_eq!(summary(&long), format!("{} … {}", "ä".repeat(200), "ö".repeat(100)));
    }
}
