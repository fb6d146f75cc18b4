//! Random queries over a relation `t (id, grp, text)`: filters, sorts, limits, joins, unions, CASE, subqueries, windows,
//! groups, tables of rows. Every one has the columns `id, grp, text, s`, and a result that does not depend on the order of evaluation.

/// Numerical Recipes' generator: the same queries on every machine.
struct Random(u64);

/// A query by its number. Rows of every other one have an order, which [`is_ordered`] sees.
pub(crate) fn query(seed: u64) -> String {
    let query = Random(seed).relation(1 + seed % 3);
    match seed % 2 {
        1 => format!("SELECT id, {} AS x, s FROM ({query}) q{TOTAL}", Random(seed + 1).scalar("")),
        _ => query,
    }
}

/// Whether the rows of a query have an order.
pub(crate) fn is_ordered(query: &str) -> bool {
    query.ends_with(TOTAL)
}

/// An order without ties but those of equal rows.
const TOTAL: &str = " ORDER BY id, grp, text, s";

/// Breaks ties by every column.
const ALL: &str = "id, grp, text, s";

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len() as u64) as usize]
    }

    /// A number made from the columns of a relation.
    fn scalar(&mut self, r: &str) -> String {
        let scalar = match self.below(16) {
            0 => "elmo_embed({r}text)[1]",
            1 => "elmo_embed({r}text, layers => 'top')[2]",
            2 => "CASE WHEN {r}grp = 1 THEN elmo_embed({r}text)[2] ELSE {r}s END",
            3 => "coalesce({r}s, elmo_embed({r}text)[1])",
            4 => "elmo_cosine(elmo_embed({r}text), elmo_embed('cold soup'))",
            5 => "elmo_similarity({r}text, 'warm bread')",
            6 => "CASE WHEN elmo_embed({r}text)[1] > 0.0 THEN elmo_embed({r}text, pooling => 'max')[2] ELSE {r}s END",
            7 => "elmo_word({r}text, 0, 3)[1]",
            8 => "elmo_embed(concat({r}text, '!'))[1]",
            9 => "nullif({r}s, elmo_embed({r}text)[1])",
            10 => {
                "CASE {r}grp WHEN 0 THEN elmo_embed({r}text)[1] WHEN 1 THEN elmo_embed({r}text, pooling => 'max')[1] END"
            }
            11 => "(try_elmo_embed({r}text))['embedding'][2]",
            12 => "array_length(elmo_tokens({r}text))",
            13 => "abs({r}s)",
            _ => "{r}s",
        };
        format!("CAST({} AS DOUBLE)", scalar.replace("{r}", r))
    }

    fn condition(&mut self, r: &str) -> String {
        let scalar = self.scalar(r);
        match self.below(10) {
            0 => format!("{r}grp = 1"),
            1 => format!("{r}s > 0.0"),
            2 => format!("{scalar} > 0.0"),
            3 => format!("({r}grp = 2 OR {scalar} > 0.0)"),
            4 => format!("{r}grp <> 1 AND {scalar} < 0.5"),
            5 => format!("NOT ({r}grp = 0 AND {scalar} > 0.0)"),
            6 => format!("{scalar} IS NULL"),
            7 => format!("{scalar} BETWEEN -0.1 AND 0.2"),
            8 => format!("{scalar} IS DISTINCT FROM {}", self.scalar(r)),
            _ => format!("{r}text IS NOT NULL"),
        }
    }

    fn leaf(&mut self) -> &'static str {
        match self.below(9) {
            0 => {
                "SELECT value AS id, value % 4 AS grp, CASE WHEN value % 11 <> 3 THEN concat('warm ', value % 6) END AS text, \
                 CAST(value AS DOUBLE) - 9.0 AS s FROM generate_series(0, 19)"
            }
            1 => {
                "SELECT column1 AS id, column2 AS grp, column3 AS text, column4 AS s \
                 FROM (VALUES (1, 1, 'cold soup', 0.5), (2, 2, NULL, -1.0), (39, 3, 'the bank', 2.0))"
            }
            2 => {
                "SELECT column1 AS id, column2 AS grp, column3 AS text, CAST(column4 AS DOUBLE) AS s \
                 FROM (VALUES (1, 1, 'cold soup', elmo_embed('cold soup')[1]), (2, 2, NULL, -1.0), (39, 3, 'the bank', NULL))"
            }
            _ => "SELECT id, grp, text, CAST(id AS DOUBLE) - 20.0 AS s FROM t",
        }
    }

    /// A relation `id, grp, text, s`.
    fn relation(&mut self, depth: u64) -> String {
        if depth == 0 {
            return self.leaf().to_owned();
        }
        let inner = self.relation(depth - 1);
        match self.below(3) {
            0 => self.of_rows(&inner),
            1 => self.of_groups(&inner),
            _ => {
                let other = self.relation(depth - 1);
                self.of_two(&inner, &other)
            }
        }
    }

    /// What looks at one row after the other.
    fn of_rows(&mut self, inner: &str) -> String {
        let (scalar, condition) = (self.scalar(""), self.condition(""));
        match self.below(6) {
            0 => format!("SELECT id, grp, text, {scalar} AS s FROM ({inner}) r"),
            1 => format!("SELECT id, grp, text, {scalar} AS s FROM ({inner}) r WHERE {condition}"),
            2 => {
                let (order, limit, offset) =
                    (self.one(&["", "DESC", "NULLS FIRST", "DESC NULLS LAST"]), self.below(30), self.below(5));
                format!("SELECT * FROM ({inner}) r ORDER BY {scalar} {order}, {ALL} LIMIT {limit} OFFSET {offset}")
            }
            3 => {
                let logic = self.one(&["AND", "OR"]);
                format!(
                    "SELECT id, grp, text, s FROM (SELECT *, elmo_embed(text) AS e FROM ({inner}) q) r \
                     WHERE e[1] > 0.0 {logic} {condition}"
                )
            }
            4 => format!(
                "SELECT id, grp, text, CAST(token['end'] AS DOUBLE) + coalesce(token['embedding'][1], 0.0) AS s \
                 FROM (SELECT id, grp, text, unnest(elmo_tokens(text)) AS token FROM ({inner}) q) r"
            ),
            _ => format!("SELECT DISTINCT id, grp, text, {scalar} AS s FROM ({inner}) r"),
        }
    }

    /// What looks at several rows.
    fn of_groups(&mut self, inner: &str) -> String {
        let (scalar, condition) = (self.scalar(""), self.condition(""));
        match self.below(11) {
            0 => format!(
                "SELECT min(id) AS id, grp, max(text) AS text, max({scalar}) AS s FROM ({inner}) r GROUP BY grp"
            ),
            1 => format!(
                "SELECT id, grp, text, CAST(row_number() OVER (PARTITION BY grp ORDER BY {scalar}, {ALL}) AS DOUBLE) AS s \
                 FROM ({inner}) r"
            ),
            2 => {
                let (function, frame) = (
                    self.one(&["lag", "lead", "first_value", "max"]),
                    self.one(&["", " ROWS BETWEEN 2 PRECEDING AND 1 FOLLOWING"]),
                );
                format!(
                    "SELECT id, grp, text, CAST({function}({scalar}) OVER (PARTITION BY grp ORDER BY {ALL}{frame}) AS DOUBLE) AS s \
                     FROM ({inner}) r"
                )
            }
            3 => format!(
                "SELECT min(id) AS id, grp, min(text) AS text, max({scalar}) FILTER (WHERE {condition}) AS s \
                 FROM ({inner}) r GROUP BY grp HAVING count(*) > 2"
            ),
            4 => {
                let sets =
                    self.one(&["GROUPING SETS ((grp, text), (grp), ())", "ROLLUP (grp, text)", "CUBE (grp, text)"]);
                format!("SELECT max(id) AS id, grp, text, max({scalar}) AS s FROM ({inner}) r GROUP BY {sets}")
            }
            5 => {
                // DataFusion 55 panics if a key occurs twice.
                let order = self.one(&[
                    "id DESC, text, s",
                    "text NULLS FIRST, id, s",
                    "s DESC, id, text",
                    "elmo_embed(text)[1], id, text, s",
                ]);
                format!("SELECT DISTINCT ON (grp) id, grp, text, {scalar} AS s FROM ({inner}) r ORDER BY grp, {order}")
            }
            6 => {
                let (function, nulls) =
                    (self.one(&["first_value", "last_value"]), self.one(&["", " IGNORE NULLS", " RESPECT NULLS"]));
                let filter = self.one(&["", "", " FILTER (WHERE id > 5)"]);
                let keys = self.one(&[" GROUP BY grp", " GROUP BY grp, text", ""]);
                format!(
                    "SELECT min(id) AS id, max(grp) AS grp, {function}(text ORDER BY {ALL}) AS text, \
                     {function}({scalar} ORDER BY {ALL}){filter}{nulls} AS s FROM ({inner}) r{keys}"
                )
            }
            7 => format!(
                "SELECT id, grp, text, CAST(rank() OVER (PARTITION BY grp ORDER BY {scalar}) AS DOUBLE) \
                 + coalesce(min({scalar}) OVER (ORDER BY {ALL}), 0.0) + coalesce(max({}) OVER (PARTITION BY grp), 0.0) AS s \
                 FROM ({inner}) r",
                self.scalar("")
            ),
            8 => format!(
                "SELECT id, grp, text, {scalar} AS s FROM ({inner}) r \
                 QUALIFY row_number() OVER (PARTITION BY grp ORDER BY {}, {ALL}) <= 3",
                self.scalar("")
            ),
            9 => format!(
                "SELECT max(id) AS id, grp, max(text) AS text, max(s) AS s \
                 FROM (SELECT id, grp, text, s, {scalar} AS a, {} AS b FROM ({inner}) q) r GROUP BY GROUPING SETS ((grp, a), (grp, b), (grp))",
                self.scalar("")
            ),
            _ => format!(
                "SELECT count(*) AS id, count(DISTINCT {scalar}) AS grp, max(text) AS text, CAST(max(e[2]) AS DOUBLE) AS s \
                 FROM (SELECT *, elmo_embed(text) AS e FROM ({inner}) q) r GROUP BY e"
            ),
        }
    }

    /// What puts two relations together.
    fn of_two(&mut self, inner: &str, other: &str) -> String {
        match self.below(14) {
            0 => {
                let kind = self.one(&["INNER", "LEFT", "RIGHT", "FULL"]);
                let (on, s) = (self.condition("b."), self.scalar("a."));
                format!(
                    "SELECT a.id, b.grp, a.text, {s} AS s FROM ({inner}) a {kind} JOIN ({other}) b ON a.id = b.id AND {on}"
                )
            }
            1 => {
                let (kind, far) = (self.one(&["LEFT", "RIGHT", "FULL"]), self.one(&["0.0", "15.0", "1000.0"]));
                let on = self.condition("b.");
                format!(
                    "SELECT a.id, b.grp, a.text, b.s FROM ({inner}) a {kind} JOIN ({other}) b ON a.s < b.s - {far} AND {on}"
                )
            }
            2 => format!("({inner}) {} ({other})", self.one(&["UNION ALL", "UNION", "INTERSECT", "EXCEPT"])),
            3 => {
                let kind = self.one(&["IN", "NOT IN"]);
                format!("SELECT * FROM ({inner}) r WHERE id {kind} (SELECT id FROM ({other}) q WHERE id IS NOT NULL)")
            }
            4 => {
                let (not, s) = (self.one(&["", "NOT "]), self.scalar("q."));
                format!(
                    "SELECT * FROM ({inner}) r WHERE {not}EXISTS (SELECT 1 FROM ({other}) q WHERE q.grp = r.grp AND {s} > 0.05)"
                )
            }
            5 => {
                let (not, far) = (self.one(&["", "NOT "]), self.one(&["0.0", "25.0"]));
                format!(
                    "SELECT * FROM ({inner}) r WHERE {not}EXISTS (SELECT 1 FROM ({other}) q WHERE q.s > r.s + {far})"
                )
            }
            6 => {
                let (kind, on, s) = (self.one(&["SEMI", "ANTI"]), self.condition("b."), self.scalar("a."));
                format!(
                    "SELECT a.id, a.grp, a.text, {s} AS s FROM ({inner}) a LEFT {kind} JOIN ({other}) b ON a.id = b.id AND {on}"
                )
            }
            7 => format!(
                "SELECT id, grp, text, CAST((SELECT max({}) FROM ({other}) q WHERE q.id = r.id) AS DOUBLE) AS s FROM ({inner}) r",
                self.scalar("q.")
            ),
            8 => {
                let (kind, on, s) = (self.one(&["SEMI", "ANTI"]), self.condition("a."), self.scalar("b."));
                format!(
                    "SELECT b.id, b.grp, b.text, {s} AS s FROM ({inner}) a RIGHT {kind} JOIN ({other}) b ON a.id = b.id AND {on}"
                )
            }
            9 => format!(
                "SELECT r.id, r.grp, l.text, l.s FROM ({inner}) r CROSS JOIN LATERAL \
                 (SELECT q.text, {} AS s FROM ({other}) q WHERE q.id = r.id) l",
                self.scalar("q.")
            ),
            10 => {
                let function = self.one(&["min", "max"]);
                format!(
                    "SELECT * FROM ({inner}) r WHERE {} >= (SELECT {function}({}) FROM ({other}) q)",
                    self.scalar("r."),
                    self.scalar("q.")
                )
            }
            11 => {
                let (not, a, b) = (self.one(&["", "NOT "]), self.scalar("r."), self.scalar("q."));
                format!(
                    "SELECT * FROM ({inner}) r WHERE {not}EXISTS (SELECT 1 FROM ({other}) q WHERE q.grp = r.grp AND {a} > {b})"
                )
            }
            12 => {
                let (not, s) = (self.one(&["", "NOT "]), self.scalar("q."));
                format!("SELECT * FROM ({inner}) r WHERE {} {not}IN (SELECT {s} FROM ({other}) q)", self.scalar("r."))
            }
            _ => {
                let (s, on) = (self.scalar("a."), self.condition("b."));
                format!(
                    "WITH c AS ({inner}) SELECT a.id, b.grp, b.text, {s} AS s FROM c a JOIN c b ON a.id = b.id WHERE {on}"
                )
            }
        }
    }
}
