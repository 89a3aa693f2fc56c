-- The example of the demo and of `make psql`: a month of hours that have been worked and are to be billed at one rate.

CREATE TABLE rates (
    month text PRIMARY KEY,
    rate  numeric(8, 2) NOT NULL
);

CREATE TABLE invoices (
    id        integer PRIMARY KEY,
    month     text NOT NULL REFERENCES rates,
    customer  text NOT NULL,
    hours     numeric(6, 2) NOT NULL,
    total     numeric(12, 2),
    billed_by text
);

INSERT INTO rates VALUES ('2026-11', 80.00);

-- computed, not random: the same invoices every time
INSERT INTO invoices (id, month, customer, hours)
SELECT i, '2026-11', 'customer ' || i, 1 + (i * 7919 % 160) / 4.0
FROM generate_series(1, 10000) AS i;

ANALYZE rates, invoices;
